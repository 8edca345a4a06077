"""A running machine's disks follow its document, where its driver can.

The one rule: the machine is asked what it has; a disk is withdrawn only after the guest has let it go.
"""

from __future__ import annotations

import dataclasses

from hostagent.drivers.machine.protocol import DiskAttachment, DiskPlugs, MachineDriver
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import DiskWanted, VmWanted
from hostagent.verbs import volume
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job
from hostagent.verbs.records import VmRecord

LET_GO_SECONDS = 20.0
Detail = dict[str, str | int | float | bool | None]


async def attachment(agent: Agent, disk: DiskWanted) -> DiskAttachment:
    """The volume, served to its machine. Raises AgentError `volume.missing`, and what serving raises."""
    wanted = agent.documents.get("volume", disk.volume_id)
    if wanted is None or agent.documents.is_purged("volume", disk.volume_id):
        raise AgentError("volume.missing", f"volume {disk.volume_id} is not on this host", volume=disk.volume_id)
    seen = await volume.export(agent, wanted)
    return DiskAttachment(
        volume_id=disk.volume_id,
        transport=seen.transport,
        path=seen.path,
        is_boot=disk.is_boot,
        num_queues=wanted.num_queues,
        queue_size=wanted.queue_size,
    )


def can(agent: Agent, document: VmWanted) -> bool:
    return isinstance(agent.drivers.machines.get(document.driver), DiskPlugs)


def differ(document: VmWanted, record: VmRecord) -> bool:
    return record.disks is not None and set(record.disks) != {disk.volume_id for disk in document.disks}


def detail(agent: Agent, document: VmWanted, record: VmRecord) -> Detail:
    """`disks`: the volumes that the machine has; `detaching`: those of them that it should not have any more."""
    if record.disks is None:
        return {}
    wanted = {disk.volume_id for disk in document.disks}
    leaving = sorted(set(record.disks) - wanted) if can(agent, document) else []
    return {
        "disks": ",".join(sorted(record.disks)),
        "detaching": ",".join(leaving),
        "disks_pending": can(agent, document) and differ(document, record),
    }


async def settle(agent: Agent, driver: MachineDriver, document: VmWanted, job: Job) -> None:
    """Raises AgentError `vm.detach_waits` (retryable; context `volumes`) where the guest keeps a disk, `vm.plug_failed`."""
    record = agent.records.get_or_make(document.id)
    if not isinstance(driver, DiskPlugs) or not differ(document, record):
        return
    wanted = {disk.volume_id: disk for disk in document.disks}
    present = set(await driver.plugged(document.id))
    kept: list[str] = []
    for volume_id in sorted(present - wanted.keys()):
        job.step = "detach"
        if await driver.unplug(document.id, volume_id, seconds=LET_GO_SECONDS):
            present.discard(volume_id)
            _note(agent, document.id, present)
            await _withdraw(agent, volume_id)
        else:
            kept.append(volume_id)
    for volume_id in sorted(wanted.keys() - present):
        job.step = "attach"
        await driver.plug(document, await attachment(agent, wanted[volume_id]))
        present.add(volume_id)
    _note(agent, document.id, present)
    if kept:
        words = f"the guest of {document.id} does not let go of {', '.join(kept)}: unmount it there, or stop the machine"
        raise AgentError("vm.detach_waits", words, volumes=kept)


def _note(agent: Agent, vm_id: str, volume_ids: set[str]) -> None:
    record = agent.records.get_or_make(vm_id)
    agent.records.put(vm_id, dataclasses.replace(record, disks=tuple(sorted(volume_ids))))


async def _withdraw(agent: Agent, volume_id: str) -> None:
    """Not served any more, unless another machine's document names it by now."""
    wanted = agent.documents.get("volume", volume_id)
    if wanted is not None and not agent.documents.is_purged("volume", volume_id):
        await volume.export(agent, wanted)
