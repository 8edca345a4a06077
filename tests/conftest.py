"""Shared fixtures: one throw-away PostgreSQL for the whole session, a fresh database for each test that asks.

`REQUIRE_CAPS=netns,qemu` turns a skip for a missing capability into a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.embedded.postgres import Postgres
from tests import namespaces

TEMPLATE = "bedplate_template"


def _can_make_namespaces() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


CAPABILITIES: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "netns": _can_make_namespaces,
    "wireguard": lambda: shutil.which("wg") is not None and shutil.which("wireguard-go") is not None,
    "bird": lambda: shutil.which("bird", path="/usr/sbin:/usr/bin") is not None,
    "sshd": lambda: shutil.which("sshd", path="/usr/sbin:/usr/bin") is not None,
    "nft": lambda: os.access("/usr/sbin/nft", os.X_OK) and Path("/usr/lib/python3/dist-packages/nftables").is_dir(),
    "qemu": lambda: shutil.which("qemu-system-x86_64") is not None,
    "qsd": lambda: shutil.which("qemu-storage-daemon") is not None,
    "runc": lambda: shutil.which("runc", path="/usr/sbin:/usr/bin") is not None,
    "model": lambda: any(shutil.which(name) for name in ("pip3", "pip", "uv")),
    "systemd": lambda: os.geteuid() == 0 and Path("/run/systemd/system").is_dir(),
    "busybox": lambda: shutil.which("busybox") is not None,
    "pebble": lambda: all(shutil.which(name) for name in ("pebble", "pebble-challtestsrv")),
    "debootstrap": lambda: shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is not None,
}


@cache
def has_capability(name: str) -> bool:
    return CAPABILITIES[name]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--metal", action="store_true", help="also run the long tests on an emulated metal host")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    required = set(filter(None, os.environ.get("REQUIRE_CAPS", "").split(",")))
    for item in items:
        if item.get_closest_marker("thorough") and not config.getoption("--metal"):
            item.add_marker(pytest.mark.skip(reason="thorough: run with --metal"))
        for marker in item.iter_markers("caps"):
            missing = [name for name in marker.args if not has_capability(name)]
            if missing and not required.intersection(missing):
                item.add_marker(pytest.mark.skip(reason=f"this machine lacks: {', '.join(missing)}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what this machine could not run, and why."""
    left_out: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        left_out[reason.removeprefix("Skipped: ")] += 1
    if missing := sorted(name for name in CAPABILITIES if not has_capability(name)):
        terminalreporter.write_line(f"this machine lacks: {', '.join(missing)}")
    for reason, count in sorted(left_out.items()):
        terminalreporter.write_line(f"left out: {count} tests ({reason})")


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
def own_network() -> Iterator[None]:
    """This thread in a fresh network namespace; the machine's own is not touched."""
    with namespaces.own():
        yield


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
