"""One emulated server for the whole session: it boots once, late (`tests/scheduling.py`), and every test leaves it as it
was. Where the cache has no disk for it, that is built beside the other tests.

METAL_HOST_DIRECTORY names a server that stays between runs, for whoever writes such tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from provisioning.lab.metal import MetalHost, MetalSpec, find
from tests.system.enrolling import Deployment, open_deployment

BUILD_SECONDS = 900
BUILDER = pytest.StashKey[subprocess.Popen[bytes]]()
MAKE_FRESH = """
agent=/opt/bedplate/agent/current/agent.pyz
test ! -e $agent || python3 -I $agent uninstall
pkill -u bedplate; userdel --force bedplate
ip -br link | cut -d' ' -f1 | grep '^bp' | xargs -rn1 ip link delete
sed -i 1q /root/.ssh/authorized_keys
"""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Of several processes one builds."""
    is_needed = any(_is_metal(item) and not item.get_closest_marker("skip") for item in session.items)
    is_needed = is_needed and os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"
    if is_needed and not session.config.option.collectonly and find() is None:
        argv = ["nice", "-n", "19", sys.executable, "-m", "provisioning.lab.metal", "build"]
        session.config.stash[BUILDER] = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A build is not cut: it ends in minutes, and the next run finds its result."""
    builder = session.config.stash.get(BUILDER, None)
    if builder is not None:
        builder.wait(timeout=BUILD_SECONDS)


def _is_metal(item: pytest.Item) -> bool:
    return item.get_closest_marker("metal") is not None


@pytest.fixture(scope="session")
def server() -> Iterator[MetalHost]:
    kept = os.environ.get("METAL_HOST_DIRECTORY", "")
    directory = Path(kept or Path(tempfile.gettempdir()) / f"bedplate-metal-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    host = MetalHost(directory, MetalSpec(name="metal1"))
    try:
        host.up()
        yield host
    finally:
        if kept:
            host.hang_up()
        else:
            host.clean()
            assert not directory.exists()
            assert not host.is_running
            assert not Path("/sys/class/net", host.record.link).exists()


@pytest.fixture
def metal(server: MetalHost) -> Iterator[MetalHost]:
    """The server without an agent, whatever the test before has left."""
    yield server
    server.exec(["sh", "-c", MAKE_FRESH], check=False, timeout=300)


@pytest.fixture
async def deployment(database_url: str, tmp_path: Path) -> AsyncIterator[Deployment]:
    """API and worker in this process."""
    async with open_deployment(database_url, tmp_path) as made:
        made.patience_seconds = 600
        yield made
