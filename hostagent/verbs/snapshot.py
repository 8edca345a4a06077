"""Snapshots: what a volume held at one moment. The one rule: taken once, then it stands on its own, also without its volume."""

from __future__ import annotations

import functools
from pathlib import Path

from hostagent.drivers.storage import layers
from hostagent.drivers.storage.protocol import VolumePlan, VolumeSnapshots
from hostagent.lib import files, keyring, pools
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Running, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge, SnapshotWanted, VolumeWanted
from hostagent.verbs import lifecycle, volume
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

MERGE_SECONDS = 0.5  # of waiting before a purge is answered; the work goes on


class SnapshotKind:
    name = "snapshot"

    def check(self, agent: Agent, document: SnapshotWanted) -> None:
        driver = agent.drivers.storages.get(document.backend)
        if not isinstance(driver, VolumeSnapshots):
            raise AgentError("volume.unsupported", f"{document.backend} has no snapshots on this host", retryable=False)

    async def apply(self, agent: Agent, document: SnapshotWanted, job: Job) -> Result:
        directory = agent.paths.snapshot_directory(document.id)
        if layers.read(directory) is None:
            job.step = "snapshot"
            await _take(agent, document, directory)
        await agent.keyring.settle(directory, own_id=document.volume_id, unlock=None, kek=document.kek)
        taken = layers.read(directory)
        assert taken is not None
        return Succeeded(
            observed={
                "state": "present",
                "size_bytes": taken.size_bytes,
                "volume_id": taken.volume_id,
                "taken_unix_ms": taken.taken_unix_ms,
                "consistency": "crash",
                "encrypted": taken.is_encrypted,
                "layers": layers.told(directory, document.id),
                "keys": keyring.handed_out(directory),
            }
        )

    async def remove(self, agent: Agent, object_id: str, document: SnapshotWanted | None) -> Running | None:
        """Gone is it when its room is: what its volume stands on besides is merged first, which may take long."""
        agent.keyring.erase(agent.paths.snapshot_directory(object_id))
        key = (self.name, object_id)
        drivers = [agent.drivers.storages.get(document.backend)] if document else list(agent.drivers.storages.values())
        for driver in drivers:
            if isinstance(driver, VolumeSnapshots):
                drop = functools.partial(driver.drop_snapshot, object_id, Holders(agent))
                done = functools.partial(agent.poke, key)
                if not await agent.jobs.aside(key, drop, seconds=MERGE_SECONDS, done=done):
                    return Running(step="merging")
        files.remove_tree(agent.paths.snapshot_directory(object_id))
        return None

    async def observe(self, agent: Agent, object_id: str, document: SnapshotWanted | None) -> Observed | None:
        pools.check(agent.paths, "snapshot", object_id)
        taken = layers.read(agent.paths.snapshot_directory(object_id))
        if taken is None:
            return None
        detail: dict[str, str | int | float | bool | None] = {
            "size_bytes": taken.size_bytes,
            "volume_id": taken.volume_id,
            "taken_unix_ms": taken.taken_unix_ms,
            "encrypted": taken.is_encrypted,
        }
        generation = document.generation if document else None
        state = "present" if document else "unknown"
        return Observed(id=object_id, kind="snapshot", generation=generation, state=state, detail=detail)

    def is_settled(self, document: SnapshotWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return tuple(sorted(path.parent.name for path in (agent.paths.state / "snapshot").glob(f"*/{layers.FILE}")))


KIND = SnapshotKind()


class Holders:
    """Volumes and snapshots of this host, for a driver that merges what they stand on."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def plan(self, volume_id: str) -> VolumePlan | None:
        document: VolumeWanted | None = self._agent.documents.get("volume", volume_id)
        if document is None or self._agent.documents.is_purged("volume", volume_id):
            return None
        return await volume.plan_of(self._agent, document)

    async def keys(self, directory: Path) -> dict[str, bytes]:
        return (await self._agent.keyring.open(directory)).keys


async def ensure(agent: Agent, body: SnapshotWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def _take(agent: Agent, document: SnapshotWanted, directory: Path) -> None:
    """The keys first: what cannot be opened is no copy."""
    origin: VolumeWanted | None = agent.documents.get("volume", document.volume_id)
    if origin is None or agent.documents.is_purged("volume", document.volume_id):
        raise AgentError("volume.missing", f"volume {document.volume_id} is not on this host", volume=document.volume_id)
    driver = volume.driver_of(agent, origin)
    if not isinstance(driver, VolumeSnapshots):
        raise AgentError("volume.unsupported", f"{origin.backend} has no snapshots", retryable=False)
    if await driver.observe(origin.id) is None:
        raise AgentError("volume.missing", f"volume {origin.id} has no data yet", volume=origin.id)
    pools.place(agent.paths, "snapshot", document.id, pools.pool_of(agent.paths, "volume", origin.id))
    agent.keyring.inherit(agent.paths.volume_directory(origin.id), directory)
    await driver.snapshot(await volume.plan_of(agent, origin), document.id, directory)
