"""Every storage driver: data made once, grown but never shrunk, exported again after a death, gone when removed."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.drivers.storage.fake import FakeStorage
from hostagent.drivers.storage.protocol import StorageDriver, VolumePlan
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation, VolumeWanted
from tests.conformance.conftest import Daemon

MIB = 1 << 20
VOLUME = "vol_1"
UID = 0x7800_0000 if os.geteuid() == 0 else os.geteuid()


@pytest.fixture(params=["fake", pytest.param("qsd", marks=pytest.mark.caps("qsd"))])
async def storage(request: pytest.FixtureRequest, paths: Paths, daemon: Daemon) -> AsyncIterator[StorageDriver]:
    if request.param == "fake":
        yield FakeStorage()
        return
    driver = QsdStorage(daemon.driver, paths)
    yield driver
    for volume_id in await driver.volume_ids():
        await driver.remove(volume_id)


@pytest.fixture
def plan(paths: Paths) -> VolumePlan:
    base = paths.image_directory("img_1") / "root.raw"
    base.parent.mkdir(parents=True)
    base.write_bytes(b"b" * (4 * MIB))
    return VolumePlan(
        volume=VolumeWanted(id=VOLUME, generation=Generation(epoch=1, number=1), size_bytes=8 * MIB),
        directory=paths.volume_directory(VOLUME),
        run_directory=paths.volume_run_directory(VOLUME),
        log_path=paths.log / "volume.log",
        base=base,
        uid=UID,
        gid=UID,
    )


def of_size(plan: VolumePlan, size_bytes: int) -> VolumePlan:
    return dataclasses.replace(plan, volume=dataclasses.replace(plan.volume, size_bytes=size_bytes))


async def test_a_volume_nobody_asked_for_is_absent(storage):
    assert await storage.observe(VOLUME) is None
    await storage.remove(VOLUME)


async def test_a_volume_is_made_once_and_exported(storage, plan):
    first = await storage.apply(plan)
    again = await storage.apply(plan)

    assert (first.state, first.size_bytes, first.transport) == ("exported", 8 * MIB, "vhost_user_blk")
    assert again == first == await storage.observe(VOLUME)
    assert await storage.volume_ids() == (VOLUME,)


async def test_a_volume_grows_and_never_shrinks(storage, plan):
    await storage.apply(plan)
    assert (await storage.apply(of_size(plan, 16 * MIB))).size_bytes == 16 * MIB

    with pytest.raises(AgentError) as refused:
        await storage.apply(plan)
    assert (refused.value.code, refused.value.retryable) == ("volume.shrink_refused", False)


async def test_a_missing_base_is_named_and_nothing_is_made(storage, plan):
    plan.base.unlink()

    with pytest.raises(AgentError) as refused:
        await storage.apply(plan)
    assert refused.value.code == "volume.base_missing"
    assert await storage.observe(VOLUME) is None


async def test_a_removed_volume_is_gone(storage, plan):
    await storage.apply(plan)
    await storage.remove(VOLUME)

    assert await storage.observe(VOLUME) is None
    assert await storage.volume_ids() == ()
    await storage.remove(VOLUME)


@pytest.mark.caps("qsd", "root")
class TestQsd:
    """What only real data and a real daemon show."""

    @pytest.fixture
    def qsd(self, daemon, paths: Paths) -> QsdStorage:
        return QsdStorage(daemon.driver, paths)

    async def test_data_outlives_daemon_and_image(self, qsd, plan):
        await qsd.apply(plan)
        await qsd.stop(VOLUME)
        image_io(plan, "write -P 0x5a 0 4k")
        plan.base.unlink()  # as when its image is purged

        await qsd.apply(plan)
        await kill_daemon(qsd)
        assert (await qsd.observe(VOLUME)).state == "idle"
        await qsd.apply(plan)
        assert (await qsd.observe(VOLUME)).state == "exported"
        await qsd.stop(VOLUME)
        image_io(plan, "read -P 0x5a 0 4k")
        image_io(plan, "read -P 0x62 4096 1")

    async def test_nothing_of_it_is_open_to_others(self, qsd, plan):
        observed = await qsd.apply(plan)

        unit = await qsd.supervisor.observe(f"volume-{VOLUME}")
        status = Path(f"/proc/{unit.incarnation.pid}/status").read_text()
        assert f"Uid:\t{UID}\t" in status
        directory = plan.directory.stat()
        assert (directory.st_uid, directory.st_mode & 0o027) == (os.geteuid(), 0), "for its group to read alone"
        for private in (plan.run_directory, plan.directory / "disk.qcow2"):
            assert private.stat().st_mode & 0o077 == 0
        assert observed.path.stat().st_uid == UID

    async def test_another_machine_gets_the_export_with_its_own_uid(self, qsd, plan):
        await qsd.apply(dataclasses.replace(plan, uid=0, gid=0))
        observed = await qsd.apply(plan)

        assert observed.path.stat().st_uid == UID

    async def test_a_volume_in_use_is_not_removed(self, qsd, plan):
        observed = await qsd.apply(plan)
        _, writer = await asyncio.open_unix_connection(observed.path)
        with pytest.raises(AgentError) as refused:
            await qsd.remove(VOLUME)
        writer.close()
        await writer.wait_closed()

        assert refused.value.code == "volume.in_use"
        assert (await qsd.observe(VOLUME)).state == "exported"


def image_io(plan: VolumePlan, command: str) -> None:
    """One command of qemu-io on the disk, which no daemon holds; fails when a read finds another pattern."""
    argv = ["qemu-io", "-f", "qcow2", "-c", command, str(plan.directory / "disk.qcow2")]
    done = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20)
    assert "verification failed" not in done.stdout + done.stderr


async def kill_daemon(qsd: QsdStorage) -> None:
    unit = await qsd.supervisor.observe(f"volume-{VOLUME}")
    assert unit is not None
    assert unit.incarnation is not None
    os.kill(unit.incarnation.pid, signal.SIGKILL)

    async def has_ended() -> bool:
        observed = await qsd.supervisor.observe(f"volume-{VOLUME}")
        return observed is None or observed.state == "exited"

    assert await until(has_ended, seconds=10)
