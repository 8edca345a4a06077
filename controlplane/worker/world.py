"""Makes the world that programs get: database, links to hosts, clock, settings, sealer.

The one rule: nothing is opened here that a program could not be given as a fake.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from controlplane.core.clock import SystemClock
from controlplane.core.pace import Pace
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher
from controlplane.kernel.world import World
from controlplane.keyfile import load_sealer
from controlplane.remote.access import RowDirectory
from controlplane.remote.link import HostLinks
from controlplane.remote.ssh import SshLinks
from controlplane.settings import Settings
from controlplane.worker.engine import LocalFirst


@asynccontextmanager
async def open_world(settings: Settings) -> AsyncIterator[World[HostLinks]]:
    """The world of a worker process, closed in order at the end."""
    sealer = load_sealer(settings)
    publisher = CeleryPublisher(settings.redis.url)
    database = await Database.open(
        settings.database.url, pool_size=settings.database.pool_size, publisher=LocalFirst(publisher)
    )
    publisher.attach(database.notify)
    hosts = SshLinks(RowDirectory(database.pool, sealer), Pace(settings.images.upload_bytes_per_second))
    try:
        yield World(database=database, hosts=hosts, clock=SystemClock(), settings=settings, sealer=sealer)
    finally:
        await hosts.close()
        publisher.close()
        await database.close()
