"""What only real data and a real qemu-storage-daemon show."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hostagent.drivers.storage import layers, luks, qsd_data
from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.lib.qmp import connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import QosWanted
from tests.conformance.disks import (
    CLONE,
    KEY,
    MIB,
    OTHER_KEY,
    SNAPSHOT,
    UID,
    VOLUME,
    Disk,
    kill_daemon,
    plan_of,
    with_volume,
)

pytestmark = pytest.mark.caps("qsd", "root")
MARKER = b"MARKER-OF-A-TENANT-"


@pytest.fixture
def plan(on_base: VolumePlan) -> VolumePlan:
    return on_base


async def test_what_was_flushed_outlives_daemon_and_image(qsd, plan):
    await qsd.apply(plan)
    disk = Disk(plan)
    await disk.write(0x5A, 0, 4096)
    await kill_daemon(qsd)
    assert (await qsd.observe(VOLUME)).state == "idle"
    plan.base.unlink()  # as when its image is purged

    assert (await qsd.apply(plan)).state == "exported"
    assert await disk.holds(0x5A, 0, 4096)
    assert await disk.holds(ord("b"), 4096)


async def test_no_acknowledged_write_is_lost_when_the_daemon_is_killed(qsd, plan):
    await qsd.apply(plan)
    disk, acknowledged = Disk(plan), 0

    async def write_on() -> None:
        nonlocal acknowledged
        with contextlib.suppress(OSError):
            for number in range(120):
                await disk.write(number + 1, number << 16)
                acknowledged = number + 1

    writing = asyncio.create_task(write_on())
    assert await until(lambda: is_over(20, lambda: acknowledged), seconds=20)
    await kill_daemon(qsd)
    await writing
    await qsd.apply(plan)
    assert acknowledged >= 20
    lost = [number for number in range(acknowledged) if not await disk.holds(number + 1, number << 16, 64 << 10)]
    assert lost == []


async def is_over(least: int, count: Callable[[], int]) -> bool:
    return count() >= least


async def test_what_rests_cannot_be_read_without_the_key(qsd, plan, paths):
    observed = await qsd.apply(plan)
    await asyncio.to_thread(Disk(plan).put, MARKER * 1000, MIB)
    unit = await qsd.supervisor.observe(f"volume-{VOLUME}")
    shown = [Path(f"/proc/{unit.incarnation.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    await qsd.stop(VOLUME)

    assert observed.is_encrypted
    contents = {path: path.read_bytes() for path in paths.state.parent.rglob("*") if path.is_file()}
    assert plan.directory / "disk.qcow2" in contents
    forms = (MARKER, KEY, KEY.hex().encode(), base64.b64encode(KEY), base64.b64encode(luks.passphrase_of(KEY)))
    assert [path for path, content in contents.items() if any(form in content for form in forms)] == []
    assert [text for text in shown if any(form in text for form in forms)] == []

    with pytest.raises(AgentError, match="Invalid password"):
        await qsd.apply(dataclasses.replace(plan, keys={VOLUME: OTHER_KEY}))
    await qsd.apply(plan)
    assert Disk(plan).get(MIB, len(MARKER)) == MARKER


async def test_qemu_finds_nothing_wrong_with_the_files_we_write(paths):
    paths.run.mkdir(parents=True)
    for size_bytes in (MIB, 10 << 30, 6 << 40):
        for passphrase in (None, luks.passphrase_of(KEY)):
            disk = paths.run / "disk"
            disk.write_bytes(await luks.empty_disk(size_bytes, passphrase))
            options = f"driver=qcow2,file.filename={disk}" + (",encrypt.format=luks,encrypt.key-secret=k" if passphrase else "")
            argv = ["qemu-img", "check", "--object", "secret,id=k,file=/dev/fd/0", "--image-opts", options]
            done = subprocess.run(argv, input=passphrase or b"k", capture_output=True, check=True, timeout=60)
            assert b"No errors were found" in done.stdout


async def test_a_snapshot_holds_what_was_there_and_a_clone_begins_as_that(qsd, plan, paths):
    await qsd.apply(plan)
    directory = paths.snapshot_directory(SNAPSHOT)
    disk, clone = Disk(plan), plan_of(paths, CLONE, source=directory)
    await disk.write(0x11, 0)
    await qsd.snapshot(plan, SNAPSHOT, directory)
    assert await disk.holds(0x11, 0)
    await disk.write(0x22, 0)
    await qsd.apply(clone)
    copy = Disk(clone)
    assert await copy.holds(0x11, 0)
    assert await copy.holds(ord("b"), MIB)
    await copy.write(0x33, 64 << 10)
    await qsd.snapshot(plan, SNAPSHOT, directory)  # again: nothing new
    assert await disk.holds(0x22, 0)
    assert await disk.holds(ord("b"), 64 << 10)
    assert len(layers.read(plan.directory).layers) == 2

    await qsd.remove(VOLUME)
    for path in directory.iterdir():  # the snapshot is purged
        path.unlink()
    await qsd.stop(CLONE)
    await qsd.apply(clone)
    assert [await copy.holds(*what) for what in ((0x11, 0), (0x33, 64 << 10), (ord("b"), MIB))] == [True] * 3


async def test_a_snapshot_takes_a_time_that_does_not_grow_with_the_disk(qsd, paths):
    plan = with_volume(plan_of(paths, VOLUME), size_bytes=10 << 30)
    await qsd.apply(plan)
    disk = Disk(plan)
    await disk.write(0x11, 0, 32 * MIB)
    await disk.write(0x12, 9 << 30)
    began = time.monotonic()
    await qsd.snapshot(plan, SNAPSHOT, paths.snapshot_directory(SNAPSHOT))
    took = time.monotonic() - began
    assert await disk.holds(0x12, 9 << 30)
    print(f"snapshot_10gib_seconds: {took:.2f}")
    assert took < 5, "under a second where nothing else runs"


async def test_a_snapshot_of_an_idle_volume_is_one_too(qsd, plan, paths):
    await qsd.apply(plan)
    await Disk(plan).write(0x11, 0)
    await qsd.stop(VOLUME)
    await qsd.snapshot(plan, SNAPSHOT, paths.snapshot_directory(SNAPSHOT))

    for one in (plan, plan_of(paths, CLONE, source=paths.snapshot_directory(SNAPSHOT))):
        await qsd.apply(one)
        assert await Disk(one).holds(0x11, 0)


async def test_an_agent_that_died_between_order_and_switch_loses_nothing(qsd, plan, paths, monkeypatch):
    await qsd.apply(plan)
    disk, directory = Disk(plan), paths.snapshot_directory(SNAPSHOT)

    add_layer = qsd_data.add_layer

    async def dies(*arguments: Any) -> None:
        await add_layer(*arguments)
        raise ConnectionError("killed")

    await disk.write(0x11, 0)
    with monkeypatch.context() as patch:
        patch.setattr(qsd_data, "add_layer", dies)
        with pytest.raises(ConnectionError):
            await qsd.snapshot(plan, SNAPSHOT, directory)
    await disk.write(0x22, 64 << 10)
    assert layers.read(directory) is None

    await kill_daemon(qsd)
    await qsd.apply(plan)
    assert await disk.holds(0x11, 0)
    assert await disk.holds(0x22, 64 << 10)
    await qsd.snapshot(plan, SNAPSHOT, directory)
    await disk.write(0x33, 0)
    assert len(layers.read(plan.directory).layers) == 2
    clone = plan_of(paths, CLONE, source=directory)
    await qsd.apply(clone)
    assert await Disk(clone).holds(0x11, 0)
    assert await Disk(clone).holds(0x22, 64 << 10)


async def test_limits_are_kept_and_changed_while_it_runs(qsd, plan):
    await qsd.apply(with_volume(plan, qos=QosWanted(iops=20)))
    disk = Disk(plan)
    began = time.monotonic()
    for number in range(30):
        await disk.write(number, number << 12, 4096)
    assert time.monotonic() - began > 1.0, "30 writes at 20 requests a second"

    await qsd.apply(plan)
    async with connect(plan.run_directory / "qmp.sock") as qmp:
        now = await qmp.execute("qom-get", {"path": "/objects/limits", "property": "limits"})
    assert now["iops-total"] == 0


async def test_a_volume_grows_under_its_machine_which_sees_it_later(qsd, plan):
    plan = dataclasses.replace(plan, transport="vhost_user_blk")
    observed = await qsd.apply(plan)
    larger = with_volume(plan, size_bytes=16 * MIB)
    _, machine = await asyncio.open_unix_connection(observed.path)
    grown = await qsd.apply(larger)
    assert (grown.size_bytes, grown.is_growth_pending) == (16 * MIB, True)
    machine.close()
    await machine.wait_closed()

    async def is_seen() -> bool:
        return not (await qsd.apply(larger)).is_growth_pending

    assert await until(is_seen, seconds=10)


async def test_a_volume_from_before_encryption_goes_on_as_it_was(qsd, plan):
    plan.directory.mkdir(parents=True)
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", plan.directory / "disk.qcow2", "8M"], check=True)
    (plan.directory / "base").hardlink_to(plan.base)

    observed = await qsd.apply(dataclasses.replace(plan, keys={}))
    assert (observed.state, observed.is_encrypted) == ("exported", False)
    assert await Disk(plan).holds(ord("b"), MIB)


async def test_nothing_of_it_is_open_to_others(qsd, plan):
    plan = dataclasses.replace(plan, transport="vhost_user_blk")
    observed = await qsd.apply(plan)

    unit = await qsd.supervisor.observe(f"volume-{VOLUME}")
    status = Path(f"/proc/{unit.incarnation.pid}/status").read_text()
    assert f"Uid:\t{UID}\t" in status
    directory = plan.directory.stat()
    assert (directory.st_uid, directory.st_mode & 0o027) == (os.geteuid(), 0), "for its group to read alone"
    for private in (plan.run_directory, plan.directory / "disk.qcow2"):
        assert private.stat().st_mode & 0o077 == 0
    assert observed.path.stat().st_uid == UID


async def test_another_machine_gets_the_export_with_its_own_uid(qsd, plan):
    plan = dataclasses.replace(plan, transport="vhost_user_blk")
    await qsd.apply(dataclasses.replace(plan, uid=0, gid=0))
    observed = await qsd.apply(plan)

    assert observed.path.stat().st_uid == UID


async def test_a_volume_in_use_is_not_removed_nor_given_to_another_machine(qsd, plan):
    plan = dataclasses.replace(plan, transport="vhost_user_blk")
    observed = await qsd.apply(plan)
    _, writer = await asyncio.open_unix_connection(observed.path)
    with pytest.raises(AgentError, match="has not let go"):
        await qsd.apply(dataclasses.replace(plan, uid=UID + 1, gid=UID + 1))
    with pytest.raises(AgentError) as refused:
        await qsd.remove(VOLUME)
    writer.close()
    await writer.wait_closed()

    assert refused.value.code == "volume.in_use"
    assert (await qsd.observe(VOLUME)).state == "exported"


BOOT_SECTOR = bytes.fromhex("31c08ec0b80103bb007cb90200ba8000cd13b04b7302b045ba0204eefaf4").ljust(510, b"\0") + b"\x55\xaa"


@pytest.mark.caps("qemu")
async def test_a_machine_reads_and_writes_what_lies_there(qsd, plan, paths):
    """Firmware reads the first sector, whose few words write it to the second one and then say K to a port."""
    await qsd.apply(plan)
    await asyncio.to_thread(Disk(plan).put, BOOT_SECTOR, 0)
    served = await qsd.apply(dataclasses.replace(plan, transport="vhost_user_blk"))
    said = paths.run / "said"
    argv = ["qemu-system-x86_64", "-machine", "q35,accel=tcg,memory-backend=m", "-nodefaults", "-display", "none"]
    argv += [
        "-object",
        "memory-backend-memfd,id=m,size=64M,share=on",
        "-m",
        "64M",
        "-device",
        "isa-debugcon,iobase=0x402,chardev=c",
    ]
    argv += ["-chardev", f"file,id=c,path={said}", "-chardev", f"socket,id=d,path={served.path}", "-no-reboot"]
    argv += ["-device", "vhost-user-blk-pci,chardev=d,bootindex=0,config-wce=off"]
    machine = await asyncio.create_subprocess_exec(*argv)
    try:

        async def has_spoken() -> bool:
            return said.exists() and said.read_bytes().endswith((b"K", b"E"))

        assert await until(has_spoken, seconds=30)
        assert said.read_bytes().endswith(b"K")
    finally:
        machine.terminate()
        await machine.wait()

    async def is_let_go() -> bool:
        return (await qsd.apply(plan)).transport == "file"

    assert await until(is_let_go, seconds=10)
    assert await asyncio.to_thread(Disk(plan).get, 512, 512) == BOOT_SECTOR
