"""A machine goes on after the daemon of one of its disks died.

The one rule: what was in flight is noted before the daemon is started again, so that an agent that dies in between does not
leave a guest that waits for ever. A machine of which nothing was in flight is left alone.
"""

from __future__ import annotations

import dataclasses
import time

from hostagent.drivers.machine.protocol import MachineDriver, Resets
from hostagent.drivers.storage.protocol import StorageDriver
from hostagent.protocol.wanted import VmWanted, VolumeWanted
from hostagent.verbs.context import Agent


async def note(agent: Agent, driver: StorageDriver, document: VolumeWanted) -> None:
    """Before a volume is served again."""
    if driver.traits.keeps_inflight:
        return
    user = next((vm for vm in agent.documents.all("vm") if any(disk.volume_id == document.id for disk in vm.disks)), None)
    record = agent.records.get(user.id) if user else None
    if user is None or record is None or document.id not in (record.disks or ()) or document.id in record.reset_due:
        return
    machine = agent.drivers.machines.get(user.driver)
    if not isinstance(machine, Resets):
        return
    served, running = await driver.observe(document.id), await machine.observe(user.id)
    if served is None or served.state == "exported" or running is None or running.state != "running" or record.is_starting:
        return
    if await machine.unanswered(user.id, document.id) == 0:
        return
    agent.records.put(user.id, dataclasses.replace(record, reset_due=(*record.reset_due, document.id)))
    agent.poke(("vm", user.id))


async def revive(agent: Agent, driver: MachineDriver, document: VmWanted) -> None:
    """Reset the machine if one of its disks asks for it. Its disks are served again by now, or their own jobs see to it."""
    record = agent.records.get_or_make(document.id)
    if not record.reset_due or not isinstance(driver, Resets):
        return
    await driver.reset(document.id)
    now_ms = time.time_ns() // 1_000_000
    agent.records.put(document.id, dataclasses.replace(record, reset_due=(), resets=record.resets + 1, reset_unix_ms=now_ms))
    agent.events.emit(
        "vm.reset",
        kind="vm",
        id=document.id,
        state="running",
        reason="volume.daemon_died",
        volumes=list(record.reset_due),
    )
