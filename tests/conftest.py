"""Shared fixtures: one throw-away PostgreSQL for the whole session, a fresh database for each test that asks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.embedded.postgres import Postgres

pytest_plugins = ["tests.capabilities", "tests.timing"]
TEMPLATE = "bedplate_template"
settings.register_profile("suite", suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of a test
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
    directory = Path(tempfile.mkdtemp(prefix="bedplate-test-pg-"))
    directory.chmod(0o755)
    server = Postgres(directory=directory, is_durable=False)
    server.prepare()

    process = server.start()
    try:
        asyncio.run(_make_template(server))
        yield server
    finally:
        server.stop()
        if process is not None:
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


async def _make_template(server: Postgres) -> None:
    from controlplane.models.all import metadata

    admin = await asyncpg.connect(server.url("postgres"))
    await admin.execute(f"CREATE DATABASE {TEMPLATE}")
    await admin.close()
    engine = create_async_engine(server.url(TEMPLATE).replace("postgresql://", "postgresql+asyncpg://"))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()


@pytest.fixture
async def database_url(postgres: Postgres) -> AsyncIterator[str]:
    """URL (`postgresql://…`) of a fresh database with the whole schema."""
    name = f"test_{uuid.uuid4().hex}"
    admin = await asyncpg.connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE}")
    try:
        yield postgres.url(name)
    finally:
        with contextlib.suppress(asyncpg.PostgresError):
            await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()


@pytest.fixture
async def empty_database_url(postgres: Postgres) -> AsyncIterator[str]:
    """URL of a fresh database without any table."""
    name = f"test_{uuid.uuid4().hex}"
    admin = await asyncpg.connect(postgres.url("postgres"))
    await admin.execute(f"CREATE DATABASE {name}")
    try:
        yield postgres.url(name)
    finally:
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        await admin.close()
