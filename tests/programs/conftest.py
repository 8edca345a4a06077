"""A world for programs under trial."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from controlplane.core.clock import SystemClock
from controlplane.core.sealing import Sealer
from controlplane.kernel.database import Database
from controlplane.kernel.world import World
from controlplane.settings import Settings
from tests.programs.site import Site, serving


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = await Database.open(database_url, pool_size=5)
    yield database
    await database.close()


@pytest.fixture
def world(database: Database) -> World[None]:
    """A world without hosts; replace(world, hosts=…) gives it some."""
    return World(database=database, hosts=None, clock=SystemClock(), settings=Settings(), sealer=Sealer(bytes(32)))


@pytest.fixture
def site() -> Iterator[Site]:
    """An HTTP server with files."""
    with serving() as made:
        yield made
