"""Volumes: disks on this host. The one rule: a volume is exported in the form its machine takes, to that machine's uid."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from hostagent.drivers.storage.protocol import StorageDriver, VolumeObserved, VolumePlan
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge, VmWanted, VolumeWanted
from hostagent.verbs import image, lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

_QCOW2_MAGIC = b"QFI\xfb"


class VolumeKind:
    name = "volume"

    def check(self, agent: Agent, document: VolumeWanted) -> None:
        driver_of(agent, document)
        if document.size_bytes <= 0 or bool(document.image_id) != bool(document.image_file):
            raise AgentError("volume.invalid", "a volume has a size, and a base has image and file", retryable=False)

    async def apply(self, agent: Agent, document: VolumeWanted, job: Job) -> Result:
        job.step = "export"
        observed = await export(agent, document)
        return Succeeded(observed={"state": observed.state, "path": str(observed.path), "size_bytes": observed.size_bytes})

    async def remove(self, agent: Agent, object_id: str, document: VolumeWanted | None) -> None:
        user = machine_of(agent, object_id)
        if user is not None:
            raise AgentError("volume.in_use", f"{object_id} is used by {user.id}", user=user.id)
        drivers = [driver_of(agent, document)] if document else list(agent.drivers.storages.values())
        for driver in drivers:
            await driver.remove(object_id)
        shutil.rmtree(agent.paths.volume_directory(object_id), ignore_errors=True)
        shutil.rmtree(agent.paths.volume_run_directory(object_id), ignore_errors=True)

    async def observe(self, agent: Agent, object_id: str, document: VolumeWanted | None) -> Observed | None:
        drivers = [driver_of(agent, document)] if document else list(agent.drivers.storages.values())
        for driver in drivers:
            seen = await driver.observe(object_id)
            if seen is not None:
                generation = document.generation if document else None
                detail: dict[str, str | int | float | bool | None] = {
                    "size_bytes": seen.size_bytes,
                    "transport": seen.transport,
                    "path": str(seen.path),
                }
                state = seen.state if document else "unknown"
                return Observed(id=object_id, kind="volume", generation=generation, state=state, detail=detail)
        return None

    def is_settled(self, document: VolumeWanted, observed: Observed | None) -> bool:
        if observed is None or observed.state != "exported":
            return False
        size_bytes = observed.detail.get("size_bytes")
        return isinstance(size_bytes, int) and size_bytes >= document.size_bytes

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return tuple(sorted({name for driver in agent.drivers.storages.values() for name in await driver.volume_ids()}))


KIND = VolumeKind()


async def ensure(agent: Agent, body: VolumeWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def export(agent: Agent, document: VolumeWanted) -> VolumeObserved:
    """The volume's data and export, also when called for the machine that uses it."""
    return await driver_of(agent, document).apply(_plan(agent, document))


def driver_of(agent: Agent, document: VolumeWanted) -> StorageDriver:
    driver = agent.drivers.storages.get(document.backend)
    if driver is None:
        raise AgentError("volume.driver_missing", f"this host has no storage driver {document.backend}", retryable=False)
    return driver


def machine_of(agent: Agent, volume_id: str) -> VmWanted | None:
    """The machine whose document names the volume, unless it is being purged."""
    for vm in agent.documents.all("vm"):
        if any(disk.volume_id == volume_id for disk in vm.disks) and not agent.documents.is_purged("vm", vm.id):
            return vm
    return None


def _plan(agent: Agent, document: VolumeWanted) -> VolumePlan:
    user = machine_of(agent, document.id)
    machine = agent.drivers.machines.get(user.driver) if user else None
    uid = agent.records.uid(user.id) if user else 0
    base = image.file_of(agent, document.image_id, document.image_file) if document.image_id else None
    return VolumePlan(
        volume=document,
        directory=agent.paths.volume_directory(document.id),
        run_directory=agent.paths.volume_run_directory(document.id),
        log_path=agent.paths.log / "volume" / f"{document.id}.log",
        transport=machine.traits.disk_transport if machine else "vhost_user_blk",
        base=base,
        base_format=_format_of(base) if base else "raw",
        uid=uid,
        gid=uid,
    )


def _format_of(path: Path) -> Literal["raw", "qcow2"]:
    with path.open("rb") as file:
        return "qcow2" if file.read(4) == _QCOW2_MAGIC else "raw"
