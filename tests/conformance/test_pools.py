"""Pools on disks of their own: what lies there, and what happens when the disk is not there."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.drivers.registry import fake_drivers
from hostagent.drivers.storage import layers
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.facts.host import Learner
from hostagent.lib import pools
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Succeeded
from hostagent.protocol.wanted import Generation, Purge, SnapshotWanted, VolumeWanted
from hostagent.serve import storage_metrics
from hostagent.verbs import snapshot, volume
from hostagent.verbs.context import Agent, open_agent
from tests.conformance.conftest import Daemon

pytestmark = pytest.mark.caps("qsd", "root")
MIB = 1 << 20


def generation(number: int) -> Generation:
    return Generation(epoch=1, number=number)


class Disk:
    """A file system that can be mounted and taken away."""

    def __init__(self, path: Path) -> None:
        self.image, self.path = path.with_suffix(".img"), path
        path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(64 * MIB)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.path], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", self.path], check=True)


@pytest.fixture
def disk(paths: Paths) -> Disk:
    made = Disk(paths.state.parent / "backup")
    made.mount()
    yield made
    subprocess.run(["umount", "-q", made.path], check=False)


@pytest.fixture
async def agent(paths: Paths, daemon: Daemon) -> AsyncIterator[Agent]:
    storage = QsdStorage(daemon.driver, paths)
    drivers = dataclasses.replace(fake_drivers(), supervisor=daemon.driver, storages={"qsd": storage})
    made = await open_agent(paths, HostConfig(), drivers, version="test")
    made.settle_seconds = 20.0
    yield made
    await made.jobs.close()
    for volume_id in await storage.volume_ids():
        await storage.stop(volume_id)


async def test_a_volume_lies_in_its_pool_with_its_snapshots_and_waits_for_its_disk(agent, disk, paths):
    """Long, because one volume goes through all of it: made, snapshotted, without its disk, merged, gone."""
    wanted = VolumeWanted(id="vol_1", generation=generation(1), size_bytes=8 * MIB, pool="backup")
    with pytest.raises(AgentError, match=r"volume\.pool_unknown"):
        await volume.ensure(agent, wanted)
    paths.config.mkdir()
    (paths.config / "storage.toml").write_text(f'[pools.backup]\npath = "{disk.path}"\n')
    assert isinstance((await volume.ensure(agent, wanted)).result, Succeeded)
    assert (disk.path / "volume/vol_1/disk.qcow2").is_file()
    for number in (1, 2):
        document = SnapshotWanted(id=f"snap_{number}", generation=generation(1), volume_id="vol_1")
        assert isinstance((await snapshot.ensure(agent, document)).result, Succeeded)
    assert (disk.path / "snapshot/snap_2/disk.1.qcow2").samefile(disk.path / "volume/vol_1/disk.1.qcow2")

    async def is_gone() -> bool:
        return isinstance((await snapshot.purge(agent, Purge(id="snap_1", generation=generation(1)))).result, Succeeded)

    assert await until(is_gone, seconds=30)
    assert len(layers.read(disk.path / "volume/vol_1").layers) == 2
    assert not list((disk.path / "merge").iterdir())
    assert 'bedplate_storage_pool_total_bytes{pool="backup"}' in "\n".join(await storage_metrics.lines(agent))
    seen = await volume.KIND.observe(agent, "vol_1", wanted)
    assert seen.detail["pool"] == "backup"

    disk.unmount()
    learned = {pool.name: pool for pool in pools.all_of(paths)}
    assert (learned["primary"].is_available, learned["backup"].is_available) == (True, False)
    facts = await Learner(paths, HostConfig(), agent.drivers, "test").learn()
    assert "storage_pool_missing:backup" in facts.conditions
    with pytest.raises(AgentError, match=r"volume\.pool_missing"):
        await volume.KIND.observe(agent, "vol_1", wanted)
    newer = dataclasses.replace(wanted, generation=generation(2))
    other = dataclasses.replace(wanted, id="vol_2")
    for document in (newer, other):
        result = (await volume.ensure(agent, document)).result
        assert isinstance(result, Failed)
        assert (result.code, result.retryable) == ("volume.pool_missing", True)
    assert not list(disk.path.iterdir()), "nothing is made below an empty mount point"

    disk.mount()
    assert isinstance((await volume.ensure(agent, newer)).result, Succeeded)
    elsewhere = (await volume.ensure(agent, dataclasses.replace(wanted, generation=generation(3), pool=""))).result
    assert isinstance(elsewhere, Failed)
    assert (elsewhere.code, elsewhere.retryable) == ("volume.unsupported", False)
    for kind, object_id in ((volume, "vol_1"), (volume, "vol_2"), (snapshot, "snap_2")):
        assert isinstance((await kind.purge(agent, Purge(id=object_id, generation=generation(4)))).result, Succeeded)
    assert not [path for path in disk.path.rglob("*") if path.is_file() and path.name != pools.MARK]
    assert not [path for kind in ("volume", "snapshot") for path in (paths.state / kind).iterdir()]


def test_what_is_no_pool_is_named(paths):
    paths.config.mkdir()
    (paths.config / "storage.toml").write_text('[pools.primary]\npath = "/x"\n[pools.b]\npath = "x"\n[poolz]\n')
    assert pools.declared(paths) == ({}, ("storage.poolz", "storage.pools.primary", "storage.pools.b"))
