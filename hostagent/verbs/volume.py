"""Volumes: disks on this host. The one rule: a volume is exported in the form its machine takes, to that machine's uid, and
only while a machine's document names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hostagent.drivers.storage import layers
from hostagent.drivers.storage.protocol import StorageDriver, VolumeObserved, VolumePlan
from hostagent.lib import files, keyring, pools
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Running, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject, Unlocked, VolumeUnlock
from hostagent.protocol.wanted import Observed, Purge, VmWanted, VolumeWanted
from hostagent.verbs import image, lifecycle, revival
from hostagent.verbs.context import Agent
from hostagent.verbs.documents import check_id
from hostagent.verbs.jobs import Job, Result

_QCOW2_MAGIC = b"QFI\xfb"
_QUEUE_SIZES = tuple(1 << bit for bit in range(5, 11))
Detail = dict[str, str | int | float | bool | None]


class VolumeKind:
    name = "volume"

    def check(self, agent: Agent, document: VolumeWanted) -> None:
        traits = driver_of(agent, document).traits
        bases = (bool(document.image_id) == bool(document.image_file), not (document.image_id and document.snapshot_id))
        if document.size_bytes <= 0 or not all(bases):
            raise AgentError("volume.invalid", "a volume has a size, and a base has image and file", retryable=False)
        if document.queue_size not in _QUEUE_SIZES or document.num_queues < 1:
            raise AgentError("volume.invalid", "a volume has queues of 32 to 1024 entries, a power of two", retryable=False)
        if document.pool not in ("", pools.PRIMARY, *pools.declared(agent.paths)[0]):
            raise AgentError("volume.pool_unknown", f"this host has no pool {document.pool}", retryable=False)
        if document.encryption.unlock == "control_plane" and document.encryption.kek is None:
            raise AgentError("volume.invalid", "without a host's wrap and without a KEK its key would be lost", retryable=False)
        if document.encryption.cipher == "none" and not agent.config.unencrypted_volumes:
            raise AgentError("volume.unencrypted", "this host makes no volume without encryption", retryable=False)
        if document.snapshot_id and not traits.can_snapshot:
            raise AgentError("volume.unsupported", f"{traits.name} has no snapshots", retryable=False)

    async def apply(self, agent: Agent, document: VolumeWanted, job: Job) -> Result:
        job.step = "export" if machine_of(agent, document.id) else "create"
        try:
            observed = await export(agent, document)
        except AgentError as error:
            if error.code != "volume.locked":
                raise
            return Running(step="locked", needs=tuple(error.context["needs"]))
        if needs := agent.keyring.locked(agent.paths.volume_directory(document.id)):
            return Running(step="locked", needs=needs)  # no daemon asks for its keys yet; its next snapshot or machine will
        return Succeeded(
            observed={
                "state": observed.state,
                "path": str(observed.path),
                "size_bytes": observed.size_bytes,
                "encrypted": observed.is_encrypted,
                "takes_effect": "after_reboot" if observed.is_growth_pending else "now",
                "layers": layers.told(agent.paths.volume_directory(document.id), document.id),
                "keys": keyring.handed_out(agent.paths.volume_directory(document.id)),
            }
        )

    async def remove(self, agent: Agent, object_id: str, document: VolumeWanted | None) -> None:
        user = machine_of(agent, object_id)
        if user is not None:
            raise AgentError("volume.in_use", f"{object_id} is used by {user.id}", user=user.id)
        drivers = [driver_of(agent, document)] if document else list(agent.drivers.storages.values())
        async with agent.keys_of.hold(object_id):
            for driver in drivers:
                await driver.withdraw(object_id)
            agent.keyring.erase(agent.paths.volume_directory(object_id))
            for driver in drivers:
                await driver.remove(object_id)
            files.remove_tree(agent.paths.volume_directory(object_id))
            files.remove_tree(agent.paths.volume_run_directory(object_id))

    async def observe(self, agent: Agent, object_id: str, document: VolumeWanted | None) -> Observed | None:
        pools.check(agent.paths, "volume", object_id)
        drivers = [driver_of(agent, document)] if document else list(agent.drivers.storages.values())
        for driver in drivers:
            seen = await driver.observe(object_id)
            if seen is not None:
                if seen.incarnation is not None:
                    agent.watch(("volume", object_id), seen.incarnation)
                generation = document.generation if document else None
                state = _state(agent, seen) if document else "unknown"
                detail = _detail(agent, seen)
                return Observed(id=object_id, kind="volume", generation=generation, state=state, detail=detail)
        return None

    def is_settled(self, document: VolumeWanted, observed: Observed | None) -> bool:
        """One that waits for its keys is settled: nothing can be done here."""
        if observed is None or (observed.state == "idle" and observed.detail.get("user")):
            return False
        if observed.state == "locked":
            return True
        size_bytes = observed.detail.get("size_bytes")
        return observed.state in ("idle", "exported") and isinstance(size_bytes, int) and size_bytes >= document.size_bytes

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return tuple(sorted({name for driver in agent.drivers.storages.values() for name in await driver.volume_ids()}))


KIND = VolumeKind()


async def ensure(agent: Agent, body: VolumeWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def unlock(agent: Agent, body: VolumeUnlock) -> Unlocked:
    """Keys for a locked volume, kept in memory, and under the host's key where its document says so. Raises AgentError
    `volume.missing`, `key.unknown`, `key.wrong`.
    """
    document: VolumeWanted | None = agent.documents.get("volume", check_id(body.id))
    if document is None:
        raise AgentError("volume.missing", f"volume {body.id} is not on this host", volume=body.id)
    directory, encryption = agent.paths.volume_directory(body.id), document.encryption
    async with agent.keys_of.hold(body.id):
        _refuse_purged(agent, body.id)
        await agent.keyring.unlock(directory, ((key.id, key.sealed) for key in body.keys))
        await agent.keyring.settle(directory, own_id=document.id, unlock=encryption.unlock, kek=encryption.kek)
    agent.poke(("volume", body.id))
    return Unlocked(missing=agent.keyring.locked(directory))


async def export(agent: Agent, document: VolumeWanted) -> VolumeObserved:
    """The volume's data, and its export where a machine uses it; also when called for that machine."""
    driver, directory = driver_of(agent, document), agent.paths.volume_directory(document.id)
    async with agent.keys_of.hold(document.id):
        _refuse_purged(agent, document.id)
        pools.place(agent.paths, "volume", document.id, document.pool)
        if driver.traits.can_encrypt and await driver.observe(document.id) is None:
            await _make_keys(agent, document, directory)
        encryption = document.encryption
        await agent.keyring.settle(directory, own_id=document.id, unlock=encryption.unlock, kek=encryption.kek)
        await revival.note(agent, driver, document)
        return await driver.apply(await plan_of(agent, document))


def _refuse_purged(agent: Agent, volume_id: str) -> None:
    """With the volume's keys held: nothing of them comes back once they are erased."""
    if agent.documents.is_purged("volume", volume_id):
        raise AgentError("volume.missing", f"volume {volume_id} is being removed", volume=volume_id)


async def _make_keys(agent: Agent, document: VolumeWanted, directory: Path) -> None:
    """Before the data: its own key, and those of what it begins as."""
    if document.snapshot_id:
        agent.keyring.inherit(agent.paths.snapshot_directory(document.snapshot_id), directory)
    if document.encryption.cipher != "none":
        await agent.keyring.make(directory, document.id, document.encryption)


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


async def plan_of(agent: Agent, document: VolumeWanted) -> VolumePlan:
    user = machine_of(agent, document.id)
    machine = agent.drivers.machines.get(user.driver) if user else None
    uid = agent.records.uid(user.id) if user else 0
    base = image.file_of(agent, document.image_id, document.image_file) if document.image_id else None
    opened = await agent.keyring.open(agent.paths.volume_directory(document.id))
    return VolumePlan(
        volume=document,
        directory=agent.paths.volume_directory(document.id).resolve(),
        run_directory=agent.paths.volume_run_directory(document.id),
        log_path=agent.paths.log / "volume" / f"{document.id}.log",
        transport=machine.traits.disk_transport if machine else "vhost_user_blk",
        base=base,
        base_format=_format_of(base) if base else "raw",
        uid=uid,
        gid=uid,
        source=agent.paths.snapshot_directory(document.snapshot_id) if document.snapshot_id else None,
        keys=opened.keys,
        missing_keys=opened.missing,
        is_exported=user is not None,
    )


def _state(agent: Agent, seen: VolumeObserved) -> str:
    is_locked = seen.state == "idle" and agent.keyring.locked(agent.paths.volume_directory(seen.volume_id))
    return "locked" if is_locked else seen.state


def _detail(agent: Agent, seen: VolumeObserved) -> Detail:
    user = machine_of(agent, seen.volume_id)
    return {
        "size_bytes": seen.size_bytes,
        "transport": seen.transport,
        "path": str(seen.path),
        "encrypted": seen.is_encrypted,
        "layers": seen.layers,
        "pool": pools.pool_of(agent.paths, "volume", seen.volume_id),
        "user": user.id if user else "",
        "growth_pending": seen.is_growth_pending,
    }


def _format_of(path: Path) -> Literal["raw", "qcow2"]:
    with path.open("rb") as file:
        return "qcow2" if file.read(4) == _QCOW2_MAGIC else "raw"
