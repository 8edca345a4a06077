"""Shared fixtures: one throw-away PostgreSQL for the whole session, an empty database for each test that asks."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from controlplane.embedded.postgres import Postgres
from tests import remains
from tests.databases import Databases

pytest_plugins = ["tests.capabilities", "tests.scheduling", "tests.timing"]
PREFIX = "bedplate-test-pg"
# A busy machine is no fault of a test.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--metal", action="store_true", help="also run the long tests on an emulated metal host")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("thorough") and not config.getoption("--metal"):
            item.add_marker(pytest.mark.skip(reason="thorough: run with --metal"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server of this session's own, without fsync."""
    for left in remains.of_killed_runs(PREFIX):
        Postgres(directory=left).stop()
        shutil.rmtree(left, ignore_errors=True)
    directory = remains.directory_of(PREFIX)
    directory.mkdir()
    directory.chmod(0o755)
    server = Postgres(directory=directory, is_durable=False)
    server.prepare()

    process = server.start()
    try:
        yield server
    finally:
        server.stop()
        if process is not None:
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def databases(postgres: Postgres) -> Databases:
    made = Databases(postgres)
    asyncio.run(made.prepare())
    return made


@pytest.fixture
async def database_url(databases: Databases) -> AsyncIterator[str]:
    """URL (`postgresql://…`) of a database with the whole schema and nothing in it."""
    async with databases.whole() as url:
        yield url


@pytest.fixture
async def empty_database_url(databases: Databases) -> AsyncIterator[str]:
    """URL of a fresh database without any table."""
    async with databases.empty() as url:
        yield url
