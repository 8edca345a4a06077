"""Every storage driver: data made once, grown but never shrunk, exported again after a death, gone when removed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.drivers.storage import layers
from hostagent.drivers.storage.fake import FakeStorage
from hostagent.drivers.storage.protocol import StorageDriver, VolumePlan
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.lib.paths import Paths
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation, VolumeWanted
from tests.conformance.conftest import Daemon

MIB = 1 << 20
VOLUME = "vol_1"
CLONE = "vol_2"
KEY = os.urandom(32)
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
        keys={VOLUME: KEY},
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


async def test_a_volume_without_its_key_waits(storage, plan):
    await storage.apply(dataclasses.replace(plan, is_exported=False))
    locked = dataclasses.replace(plan, keys={}, missing_keys=(VOLUME,))

    with pytest.raises(AgentError) as refused:
        await storage.apply(locked)
    assert (refused.value.code, refused.value.retryable) == ("volume.locked", True)
    assert list(refused.value.context["needs"]) == [VOLUME]
    assert (await storage.observe(VOLUME)).state == "idle"
    assert (await storage.apply(plan)).is_encrypted


async def test_a_volume_that_nobody_uses_is_not_served(storage, plan):
    assert (await storage.apply(dataclasses.replace(plan, is_exported=False))).state == "idle"
    assert (await storage.apply(plan)).state == "exported"
    assert (await storage.apply(dataclasses.replace(plan, is_exported=False))).state == "idle"


async def test_a_snapshot_outlives_its_volume_and_begins_another(storage, plan, paths):
    await storage.apply(plan)
    directory = paths.snapshot_directory("snap_1")
    for _ in range(2):
        await storage.snapshot(plan, "snap_1", directory)
    taken = layers.read(directory)
    await storage.remove(VOLUME)

    assert (taken.volume_id, taken.size_bytes, taken.is_encrypted) == (VOLUME, 8 * MIB, True)
    assert (await storage.apply(clone_of(plan, paths, directory))).state == "exported"


async def test_a_clone_of_a_snapshot_that_is_not_there_is_refused(storage, plan, paths):
    with pytest.raises(AgentError) as refused:
        await storage.apply(clone_of(plan, paths, paths.snapshot_directory("snap_9")))
    assert refused.value.code == "volume.source_missing"


def clone_of(plan: VolumePlan, paths: Paths, source: Path) -> VolumePlan:
    return dataclasses.replace(
        plan,
        volume=dataclasses.replace(plan.volume, id=CLONE, snapshot_id=source.name),
        directory=paths.volume_directory(CLONE),
        run_directory=paths.volume_run_directory(CLONE),
        base=None,
        source=source,
        keys={VOLUME: KEY, CLONE: b"c" * 32},
    )
