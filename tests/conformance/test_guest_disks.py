"""Disks of a running guest: they come and go, are snapshotted, merged and limited under it, and outlive their daemon."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator

import pytest

from hostagent.drivers.storage import layers
from hostagent.lib.wait import until
from hostagent.protocol.wanted import Generation, Purge, QosWanted, SnapshotWanted
from hostagent.serve.keeper import Keeper
from hostagent.serve.metrics import Metrics
from hostagent.verbs import snapshot, vm
from tests.conformance.disks import kill_daemon
from tests.conformance.guests import MIB, VM, Guest, close_guest, open_guest

pytestmark = [pytest.mark.timeout(900), pytest.mark.caps("root", "qemu", "qsd", "debootstrap")]


@pytest.fixture
async def guest(paths, daemon) -> AsyncIterator[Guest]:
    made = await open_guest(paths, daemon)
    yield made
    await close_guest(made)


def generation(number: int) -> Generation:
    return Generation(epoch=1, number=number)


async def test_disks_of_a_running_guest(guest):
    """Long, because one boot is dear: each part goes on with the machine that the last one left."""
    for name in ("vol_a", "vol_b"):
        await guest.volume(name)
    began = time.monotonic()
    await guest.has("vol_a")
    await guest.is_up()
    print(f"boot: {time.monotonic() - began:.1f} s")
    assert (await guest.does("ls /sys/block")).split() == ["vda", "vdb"], "the second one is its seed"
    await guest.does("yes first | dd of=/dev/vda bs=64k count=40 iflag=fullblock conv=fsync")
    before = await guest.does("md5sum < /dev/vda")

    # a disk comes while it runs
    began = time.monotonic()
    await guest.has("vol_a", "vol_b")
    await guest.does("until [ -b /dev/vdc ]; do usleep 50000; done")
    print(f"attach: {time.monotonic() - began:.1f} s")
    await guest.does("yes second | dd of=/dev/vdc bs=64k count=4 iflag=fullblock conv=fsync")
    seen = await vm.KIND.observe(guest.agent, VM, guest.agent.documents.get("vm", VM))
    assert (seen.detail["disks"], seen.detail["detaching"], seen.detail["restart_needed"]) == ("vol_a,vol_b", "", False)

    # snapshots are taken and merged away under it
    for name in ("snap_1", "snap_2"):
        await guest.settled(snapshot.ensure, SnapshotWanted(id=name, generation=generation(1), volume_id="vol_a"))
        await guest.does(f"yes {name} | dd of=/dev/vda bs=64k count=4 seek={name[-1]} iflag=fullblock conv=fsync,notrunc")
    after = await guest.does("echo 3 > /proc/sys/vm/drop_caches; md5sum < /dev/vda")
    for name in ("snap_1", "snap_2"):
        await guest.settled(snapshot.purge, Purge(id=name, generation=generation(1)))
    assert before != after == await guest.does("echo 3 > /proc/sys/vm/drop_caches; md5sum < /dev/vda")
    assert len(layers.read(guest.agent.paths.volume_directory("vol_a")).layers) == 1

    # its limits change
    await guest.volume("vol_a", qos=QosWanted(iops=10))
    began = time.monotonic()
    await guest.does("for i in $(seq 30); do dd if=/dev/zero of=/dev/vda bs=4k seek=$i count=1 conv=fsync,notrunc; done")
    assert time.monotonic() - began > 1.5, "30 writes at 10 a second, one second's worth at once"
    await guest.volume("vol_a")

    # a disk grows, which it sees when it gets it anew
    grown = await guest.volume("vol_b", size_bytes=48 * MIB)
    assert (grown["size_bytes"], grown["takes_effect"]) == (48 * MIB, "after_reboot")
    assert await guest.does("cat /sys/block/vdc/size") == str(32 * MIB // 512), "as it was told"

    # a disk goes when the guest lets it go, and only then
    await guest.does("exec 3< /dev/vdc")
    began = time.monotonic()
    await guest.has("vol_a")
    await guest.does("exec 3<&-; [ ! -e /sys/block/vdc ]")
    print(f"detach: {time.monotonic() - began:.1f} s")
    assert (await guest.qsd.observe("vol_b")).state == "idle"
    await guest.has("vol_a", "vol_b")
    await guest.does("until [ -b /dev/vdc ]; do usleep 50000; done; dd if=/dev/vdc bs=7 count=1 2>/dev/null | grep second")
    assert await guest.does("cat /sys/block/vdc/size") == str(48 * MIB // 512)
    await guest.does("dd if=/dev/zero of=/dev/vdc bs=1M seek=47 count=1 conv=fsync,notrunc")


async def test_what_a_killed_daemon_acknowledged_is_there_and_the_guest_works_again(guest):
    """The agent that keeps them sees the death, starts the daemon anew and resets the machine: the export of this daemon has no
    memory of requests in flight, and a guest would wait for them for ever.
    """
    keeping = asyncio.create_task(Keeper(guest.agent, Metrics(), interval_seconds=1.0).run())
    try:
        await guest.volume("vol_a")
        await guest.has("vol_a")
        await guest.is_up()
        await guest.volume("vol_a", qos=QosWanted(iops=10))  # so that requests always wait
        for first in FIRST_BLOCKS:
            await guest.does(f"(i={first}; {WRITER}) &")
        assert await until(lambda: has_acknowledged(guest, 20), seconds=60)
        events = guest.agent.events.cursor
        began = time.monotonic()
        await kill_daemon(guest.qsd, "vol_a")
        await guest.is_up(times=2, seconds=ALIVE_SECONDS)
        await guest.does("dd if=/dev/zero of=/dev/vda bs=512 count=1 conv=fsync,notrunc")
        took = time.monotonic() - began
        promised = acknowledged(guest)
        print(f"works again after {took:.1f} s, {len(promised)} writes acknowledged")
        held: set[int] = set()
        for first in FIRST_BLOCKS:
            read = f"dd if=/dev/vda bs=512 skip={first + 1} count={2 * len(promised)} 2>/dev/null | tr -d '\\0'"
            held.update(int(number) for number in (await guest.does(read)).split())
        assert promised - held == set()
        assert took < ALIVE_SECONDS
        resets = [event for event in guest.agent.events.since(events) if event.event == "vm.reset"]
        assert [event.body["volumes"] for event in resets] == [["vol_a"]]

        async def is_settled() -> bool:
            seen = await vm.KIND.observe(guest.agent, VM, guest.agent.documents.get("vm", VM))
            return (seen.detail["resets"], seen.detail["reset_due"]) == (1, "")

        assert await until(is_settled, seconds=10)
    finally:
        keeping.cancel()
        await asyncio.wait({keeping})


ALIVE_SECONDS = 30
FIRST_BLOCKS = (0, 10_000)
WRITER = "while i=$((i+1)); do echo -n ' '$i | dd of=/dev/vda bs=512 seek=$i conv=fsync,notrunc 2>/dev/null && echo ok$i.; done"


def acknowledged(guest: Guest) -> set[int]:
    said = guest.agent.paths.vm_log(VM).read_text(errors="replace")
    return {int(number) for number in re.findall(r"ok(\d+)\.", said)}


async def has_acknowledged(guest: Guest, least: int) -> bool:
    return len(acknowledged(guest)) >= least
