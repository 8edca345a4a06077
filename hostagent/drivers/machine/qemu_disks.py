"""Disks that a running QEMU gets and gives back.

The one rule: QEMU is asked what it has; a guest that does not let a disk go is asked again, and never made to.
Source: QEMU 7.2, docs/pcie_pci_bridge.txt, qapi/qdev.json; PCI Express Base Specification, 6.7.1 (attention button).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from hostagent.drivers.machine.protocol import DiskAttachment
from hostagent.drivers.machine.qemu_command import DISK, PORT_SPARE, disk_id, plug_words, socket_id
from hostagent.lib.qmp import Qmp, QmpError, connect
from hostagent.protocol.errors import AgentError

PERIPHERAL = "/machine/peripheral"
PLUG_SECONDS = 20.0
DELETED = "DEVICE_DELETED"
T = TypeVar("T")


async def tell(path: Path, what: Callable[[Qmp], Awaitable[T]]) -> T:
    """One conversation with a monitor. Raises AgentError `vm.plug_failed`."""
    try:
        async with connect(path) as qmp:
            return await what(qmp)
    except QmpError as error:
        raise AgentError("vm.plug_failed", str(error)) from error


async def plugged(qmp: Qmp) -> frozenset[str]:
    return frozenset(name.removeprefix(DISK) for name in await _peripherals(qmp) if name.startswith(DISK))


async def plug(qmp: Qmp, disk: DiskAttachment) -> None:
    names = await _peripherals(qmp)
    if disk_id(disk.volume_id) in names:
        return
    buses = [str(await _property(qmp, name, "parent_bus")) for name in names if name.startswith(DISK)]
    taken = {bus.split("/")[-1] for bus in buses}
    port = next((name for name in sorted(names) if name.startswith(PORT_SPARE) and name not in taken), None)
    if port is None:
        raise AgentError("vm.plug_failed", "every slot for disks that come later is taken: restart the machine")
    with contextlib.suppress(QmpError):  # what an agent that died had begun
        await qmp.execute("chardev-remove", {"id": socket_id(disk.volume_id)})
    for command, arguments in plug_words(disk, port):
        await qmp.execute(command, arguments, seconds=PLUG_SECONDS)


async def unplug(qmp: Qmp, volume_id: str, *, seconds: float) -> bool:
    device = disk_id(volume_id)
    if device in await _peripherals(qmp):
        with contextlib.suppress(QmpError):  # it is being asked already
            await qmp.execute("device_del", {"id": device})
        if not await _is_deleted(qmp, device, seconds):
            return False
    with contextlib.suppress(QmpError):
        await qmp.execute("chardev-remove", {"id": socket_id(volume_id)})
    return True


async def unanswered(qmp: Qmp, volume_id: str) -> int | None:
    """Read from the rings in the guest's memory, of which QEMU knows where they are. Source: VIRTIO 1.2, 2.7.6 and 2.7.8: the
    running index follows two bytes of flags.
    """
    if disk_id(volume_id) not in await _peripherals(qmp):
        return 0
    path = f"{PERIPHERAL}/{disk_id(volume_id)}/virtio-backend"
    count, queue = 0, 0
    while queue < int(await qmp.execute("qom-get", {"path": path, "property": "num-queues"})):
        try:
            ring = await qmp.execute("x-query-virtio-queue-status", {"path": path, "queue": queue})
            made, answered = [await _index(qmp, int(ring[name])) for name in ("vring-avail", "vring-used")]
        except (QmpError, KeyError, ValueError):
            return None
        count += (made - answered) % (1 << 16)
        queue += 1
    return count


async def _index(qmp: Qmp, ring: int) -> int:
    if not ring:
        return 0  # the guest has not set it up
    said = str(await qmp.execute("human-monitor-command", {"command-line": f"xp /1hx {ring + 2:#x}"}))
    return int(said.partition(":")[2].strip(), 16)


async def reset(qmp: Qmp) -> None:
    await qmp.execute("system_reset")


async def _is_deleted(qmp: Qmp, device: str, seconds: float) -> bool:
    with contextlib.suppress(QmpError):
        while (await qmp.wait_for(DELETED, seconds=seconds))["data"].get("device") != device:
            continue
    return device not in await _peripherals(qmp)


async def _peripherals(qmp: Qmp) -> list[str]:
    listed: list[dict[str, Any]] = await qmp.execute("qom-list", {"path": PERIPHERAL})
    return [entry["name"] for entry in listed if entry["type"].startswith("child<")]


async def _property(qmp: Qmp, name: str, wanted: str) -> Any:
    return await qmp.execute("qom-get", {"path": f"{PERIPHERAL}/{name}", "property": wanted})
