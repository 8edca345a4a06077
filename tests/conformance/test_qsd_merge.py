"""Snapshots that go: their room is free again, and whatever dies meanwhile, no byte of anybody's changes."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hostagent import faces
from hostagent.drivers.storage import layers, qsd_chain, qsd_data
from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.drivers.storage.verify import verify
from hostagent.lib import program
from hostagent.lib.qmp import Qmp, connect
from hostagent.protocol.errors import AgentError
from tests.conformance.disks import CLONE, KEY, MIB, OTHER_KEY, VOLUME, Disk, kill_daemon, plan_of, with_volume

pytestmark = pytest.mark.caps("qsd", "root", "qemu")
BLOCK = 64 << 10


class Plans:
    """What the driver asks back."""

    def __init__(self, *plans: VolumePlan) -> None:
        self.known = {plan.volume.id: plan for plan in plans}

    async def plan(self, volume_id: str) -> VolumePlan | None:
        return self.known.get(volume_id)

    async def keys(self, directory: Path) -> dict[str, bytes]:
        del directory
        return {VOLUME: KEY, CLONE: OTHER_KEY}


async def holds(plan: VolumePlan, *wanted: int) -> bool:
    """Whether block after block is of these letters; 0: a block that was given back."""
    return [await Disk(plan).holds(letter, at * BLOCK, BLOCK) for at, letter in enumerate(wanted)] == [True] * len(wanted)


async def write(plan: VolumePlan, at: int, letter: int) -> None:
    await Disk(plan).write(letter, at * BLOCK)


async def names(qsd: QsdStorage, volume_id: str) -> tuple[list[str], list[str]]:
    """Its layers' files on disk, and those that its daemon keeps though they have no name."""
    unit = await qsd.supervisor.observe(f"volume-{volume_id}")
    held: list[str] = []
    if unit is not None and unit.incarnation is not None:
        links = [str(path.readlink()) for path in Path(f"/proc/{unit.incarnation.pid}/fd").iterdir()]
        held = [link for link in links if link.endswith("(deleted)") and ".qcow2" in link]
    return sorted(path.name for path in qsd.paths.volume_directory(volume_id).glob("*.qcow2")), held


async def dropped(qsd: QsdStorage, snapshot_id: str, *plans: VolumePlan) -> None:
    """As when no machine runs: what FUSE serves is not lifted. The volumes are served again afterwards."""
    idle = tuple(dataclasses.replace(plan, is_exported=False) for plan in plans)
    for plan in idle:
        await qsd.apply(plan)
    await qsd.drop_snapshot(snapshot_id, Plans(*idle))
    for plan in plans:
        await qsd.apply(plan)


async def test_the_room_of_a_dropped_snapshot_is_free(qsd, on_base, paths):
    await qsd.apply(on_base)
    await write(on_base, 0, 1)
    await write(on_base, 1, 1)
    await qsd.snapshot(on_base, "snap_1", paths.snapshot_directory("snap_1"))
    await write(on_base, 1, 2)
    with pytest.raises(AgentError, match="container"):
        await qsd.drop_snapshot("snap_1", Plans(on_base))
    await dropped(qsd, "snap_1", on_base)

    assert not paths.snapshot_directory("snap_1").exists()
    assert await names(qsd, VOLUME) == (["disk.1.qcow2"], [])
    assert await holds(on_base, 1, 2, ord("b"))
    assert b"root.raw" not in (on_base.directory / "disk.1.qcow2").read_bytes()[:4096], "no file names another one"
    await qsd.drop_snapshot("snap_1", Plans(on_base))

    await qsd.snapshot(on_base, "snap_2", paths.snapshot_directory("snap_2"))
    await write(on_base, 2, 3)
    await kill_daemon(qsd)
    await qsd.apply(on_base)
    assert await holds(on_base, 1, 2, 3, ord("b"))


async def test_old_snapshots_go_from_below_and_what_stands_on_them_stays(qsd, on_base, paths):
    """Long, because the parts go on with what the last ones left: the volume grown between three snapshots, a clone of the
    second one that runs; the oldest goes, the second one is refused, the third goes.
    """
    clone = with_volume(plan_of(paths, CLONE, source=paths.snapshot_directory("snap_2")), size_bytes=16 * MIB)
    await qsd.apply(on_base)
    for at in range(4):
        await write(on_base, at, 1)
    await qsd.snapshot(on_base, "snap_1", paths.snapshot_directory("snap_1"))
    grown = with_volume(on_base, size_bytes=16 * MIB)
    await qsd.apply(grown)
    await write(grown, 1, 2)
    await write(grown, 200, 2)
    await write(grown, 2, 0)
    await qsd.snapshot(grown, "snap_2", paths.snapshot_directory("snap_2"))
    await qsd.apply(clone)
    await write(clone, 5, 9)
    await write(grown, 3, 3)
    await qsd.snapshot(grown, "snap_3", paths.snapshot_directory("snap_3"))
    await write(grown, 0, 4)

    plans = Plans(grown, clone)
    await qsd.drop_snapshot("snap_1", plans)
    for plan, wanted in ((grown, (4, 2, 0, 3, ord("b"))), (clone, (1, 2, 0, 1, ord("b"), 9))):
        assert await holds(plan, *wanted)
        assert await Disk(plan).holds(2, 200 * BLOCK, BLOCK)
    assert await names(qsd, VOLUME) == (["disk.2.qcow2", "disk.3.qcow2", "disk.qcow2"], [])
    assert await names(qsd, CLONE) == (["disk.2.qcow2", "disk.qcow2"], [])
    assert [(layer.file, layer.snapshot_id) for layer in layers.read(paths.snapshot_directory("snap_2")).layers] == [
        ("disk.qcow2", "snap_2")
    ]
    assert not (paths.state / "merge" / "snap_1").exists()
    with pytest.raises(AgentError, match=r"snapshot\.in_use"):
        await qsd.drop_snapshot("snap_2", plans)
    assert paths.snapshot_directory("snap_2").exists()
    await dropped(qsd, "snap_3", grown, clone)

    for plan, wanted in ((grown, (4, 2, 0, 3, ord("b"))), (clone, (1, 2, 0, 1, ord("b"), 9))):
        await kill_daemon(qsd, plan.volume.id)
        await qsd.apply(plan)
        assert await holds(plan, *wanted)
    assert len(layers.read(grown.directory).layers) == 2


async def test_snapshots_merge_also_when_their_volume_is_gone_or_idle(qsd, on_base, paths):
    await qsd.apply(on_base)
    for number in (1, 2):
        await write(on_base, number, number)
        await qsd.snapshot(on_base, f"snap_{number}", paths.snapshot_directory(f"snap_{number}"))
    await write(on_base, 3, 3)
    await qsd.stop(VOLUME)
    idle = dataclasses.replace(on_base, is_exported=False)
    await qsd.drop_snapshot("snap_2", Plans(idle))
    assert len(layers.read(on_base.directory).layers) == 2
    assert await qsd.supervisor.observe(f"volume-{VOLUME}") is None
    await qsd.apply(on_base)
    assert await holds(on_base, ord("b"), 1, 2, 3)
    await qsd.snapshot(on_base, "snap_3", paths.snapshot_directory("snap_3"))
    await qsd.remove(VOLUME)

    await qsd.drop_snapshot("snap_1", Plans())
    clone = plan_of(paths, CLONE, source=paths.snapshot_directory("snap_3"))
    await qsd.apply(clone)
    assert await holds(clone, ord("b"), 1, 2, 3)
    assert len(layers.read(clone.directory).layers) == 2


async def test_a_snapshot_that_goes_while_it_is_taken_leaves_nothing(qsd, on_base, paths, monkeypatch):
    """Its order is on disk and the daemon was never told; the next one must find its way all the same."""
    await qsd.apply(on_base)
    await write(on_base, 0, 1)
    add_layer = qsd_data.add_layer

    async def dies(*arguments: Any) -> None:
        await add_layer(*arguments)
        raise ConnectionError("cancelled")

    with monkeypatch.context() as patch:
        patch.setattr(qsd_data, "add_layer", dies)
        with pytest.raises(ConnectionError):
            await qsd.snapshot(on_base, "snap_1", paths.snapshot_directory("snap_1"))
    await write(on_base, 1, 2)
    await qsd.snapshot(on_base, "snap_2", paths.snapshot_directory("snap_2"))
    await write(on_base, 0, 3)
    await qsd.drop_snapshot("snap_1", Plans(on_base))  # two closed ones: also while it is served

    clone = plan_of(paths, CLONE, source=paths.snapshot_directory("snap_2"))
    await qsd.apply(clone)
    assert await holds(clone, 1, 2, ord("b"))
    assert await holds(on_base, 3, 2, ord("b"))
    assert len(layers.read(on_base.directory).layers) == 2


async def test_a_snapshot_is_taken_at_once_while_another_one_is_merged(qsd, on_base, paths):
    await qsd.apply(on_base)
    for at in range(40):
        await write(on_base, at, 1)
    await qsd.snapshot(on_base, "snap_1", paths.snapshot_directory("snap_1"))
    await qsd.stop(VOLUME)
    await qsd.open(on_base, layers.read(on_base.directory))
    async with connect(on_base.run_directory / "qmp.sock") as qmp:
        await qsd_chain.begin_lift(qmp, layers.read(on_base.directory), 0, bytes_per_second=1)
    await qsd.snapshot(on_base, "snap_2", paths.snapshot_directory("snap_2"))
    await qsd.apply(on_base)
    await write(on_base, 0, 2)
    await qsd.drop_snapshot("snap_1", Plans(on_base))

    assert await holds(on_base, 2, *[1] * 39)
    assert len(layers.read(on_base.directory).layers) == 2


async def test_what_verify_says_is_what_the_daemon_does(qsd, on_base, paths, capsys):
    await qsd.apply(on_base)
    await qsd.snapshot(on_base, "snap_1", paths.snapshot_directory("snap_1"))
    (found,) = await verify(paths)
    assert (found.daemon, found.writes_to, found.problems) == ("serving", "disk.1.qcow2", ())
    assert (found.pool, found.size_bytes) == ("primary", 8 * MIB)

    written = layers.read(on_base.directory)
    layers.write(on_base.directory, dataclasses.replace(written, layers=written.layers[:1]))
    (found,) = await verify(paths)
    assert found.writes_to == "layer 1"
    assert found.problems == (
        "disk.1.qcow2 is no layer of it",
        "its daemon stands on layers [1, 0], layers.json names [0]",
    )
    layers.write(on_base.directory, written)
    (on_base.directory / "base").unlink()
    code = await asyncio.to_thread(faces.run, "storage", ["verify", "--root", str(paths.state.parent)])
    said = capsys.readouterr().out
    assert (code, "base is missing" in said, VOLUME in said) == (1, True, True)


class Killed(BaseException):
    """The agent is no more."""


@contextmanager
def killed_after(done: list[str], count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The agent dies before its operation number `count`: on files, to a daemon, by a program. What it did is listed."""
    done.clear()

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def operation(*arguments: Any, **named: Any) -> Any:
            if len(done) >= count:
                raise Killed(name)
            done.append(name)
            return real(*arguments, **named)

        patch.setattr(owner, name, operation)

    with monkeypatch.context() as patch:
        for owner, names_ in (
            (os, ("fsync", "fchown")),
            (Path, ("unlink", "rename", "hardlink_to", "mkdir", "chmod")),
            (shutil, ("rmtree",)),
            (Qmp, ("execute",)),
            (program, ("run",)),
        ):
            for name in names_:
                counted(owner, name)
        yield


@pytest.mark.parametrize("is_closed", [False, True], ids=["lifted", "taken_in"])
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.thorough)])
async def test_an_agent_killed_between_any_two_operations_loses_nothing(qsd, on_base, paths, monkeypatch, is_closed, stride):
    """Every second time the daemon dies with it. The same volume throughout: each round drops a snapshot of its own. Every run
    tries every fourth point, from another one on each time; `thorough` all.
    """
    await qsd.apply(on_base)
    await write(on_base, 0, 1)
    operations: list[str] = []
    wanted = on_base if is_closed else dataclasses.replace(on_base, is_exported=False)
    for count in itertools.count(random.randrange(stride), stride):
        gone, kept = f"snap_{2 * count}", f"snap_{2 * count + 1}"
        letter = count % 250 + 2
        await qsd.snapshot(on_base, gone, paths.snapshot_directory(gone))
        await write(on_base, 1, letter)
        if is_closed:
            await qsd.snapshot(on_base, kept, paths.snapshot_directory(kept))
            await write(on_base, 2, letter)
        is_through = True
        await qsd.apply(wanted)
        with killed_after(operations, count, monkeypatch):
            try:
                await qsd.drop_snapshot(gone, Plans(wanted))
            except Killed:
                is_through = False
        driver = QsdStorage(qsd.supervisor, paths)
        if (count // stride) % 2 and await qsd.supervisor.observe(f"volume-{VOLUME}"):
            await kill_daemon(qsd)
        await driver.apply(on_base)
        here = (1, letter, letter if is_closed else ord("b"))
        assert await holds(on_base, *here), operations
        await dropped(driver, gone, on_base)
        assert await holds(on_base, *here), operations
        if is_closed:
            await dropped(driver, kept, on_base)
            assert await holds(on_base, *here), operations
        found = layers.read(on_base.directory)
        assert await names(qsd, VOLUME) == ([found.top.file], []), operations
        if is_through:
            break
    print(f"{len(operations)} operations: {' '.join(operations)}")
    assert len(operations) > 15
