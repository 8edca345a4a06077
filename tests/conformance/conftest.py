"""What every suite needs: a directory with a short name, a plain supervisor's daemon, a network namespace of one's own."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hostagent.drivers.supervisor.plain import PlainSupervisor
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError

if TYPE_CHECKING:
    from hostagent.drivers.storage.protocol import VolumePlan
    from hostagent.drivers.storage.qsd import QsdStorage
    from tests.conformance.world import World

DEADLINE_SECONDS = 20.0


@pytest.fixture
def paths() -> Iterator[Paths]:
    """Reachable by other users, as the product's normal paths are."""
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    root.chmod(0o755)
    yield Paths.under(root)
    shutil.rmtree(root, ignore_errors=True)


class Daemon:
    """The plain supervisor as a process; `kill` and `start` again as often as a test likes."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.driver = PlainSupervisor(paths.run)
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        argv = ("-m", "hostagent.drivers.supervisor.init", "--run", str(self.paths.run))
        self.process = await asyncio.create_subprocess_exec(sys.executable, *argv)
        assert await until(self._answers, seconds=DEADLINE_SECONDS)

    async def _answers(self) -> bool:
        try:
            await self.driver.names()
        except AgentError:
            return False
        return True

    async def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self.process.wait()


@pytest.fixture
async def daemon(paths: Paths) -> AsyncIterator[Daemon]:
    made = Daemon(paths)
    await made.start()
    yield made
    if made.process is not None and made.process.returncode is None:
        await made.stop()


@pytest.fixture
async def world(paths: Paths, own_network: None) -> AsyncIterator[World]:
    """Verbs on real links, rules and flows; machines are namespaces."""
    from hostagent.drivers.network.conntrack import Conntrack
    from hostagent.drivers.network.nft import NftHelper
    from hostagent.drivers.registry import fake_drivers
    from hostagent.lib.hostconfig import HostConfig
    from hostagent.verbs import rules
    from hostagent.verbs.context import open_agent
    from tests.conformance.netns import make_outside
    from tests.conformance.world import World

    del own_network
    drivers = dataclasses.replace(fake_drivers(), rules=NftHelper(), flows=Conntrack())
    agent = await open_agent(paths, HostConfig(), drivers, version="test")
    agent.settle_seconds = 20.0
    await rules.start(agent)
    made = World(agent, *make_outside())
    try:
        yield made
    finally:
        for place in (*made.machines, made.outside, made.host):
            place.close()
        await agent.jobs.close()
        await agent.rules.close()
        drivers.flows.close()


@pytest.fixture
async def qsd(daemon: Daemon, paths: Paths) -> AsyncIterator[QsdStorage]:
    from hostagent.drivers.storage.qsd import QsdStorage

    driver = QsdStorage(daemon.driver, paths)
    yield driver
    for volume_id in await driver.volume_ids():
        await driver.stop(volume_id)


@pytest.fixture
def on_base(paths: Paths) -> VolumePlan:
    """A volume on a base of 4 MiB of the letter b."""
    from tests.conformance.disks import MIB, VOLUME, plan_of

    base = paths.image_directory("img_1") / "root.raw"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"b" * (4 * MIB))
    return plan_of(paths, VOLUME, base=base)
