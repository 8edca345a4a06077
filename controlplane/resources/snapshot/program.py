"""The life of a snapshot: taken once, kept, removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal, cast

from sqlalchemy import func, select

from controlplane.events.service import emit
from controlplane.kernel import epoch
from controlplane.kernel.program import Outcome, Program, done, goto, step, wait
from controlplane.kernel.tx import Tx
from controlplane.models.host import Host
from controlplane.models.snapshot import Snapshot
from controlplane.placement.wake import wake_waiting
from controlplane.remote.link import HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out, refusals_park
from controlplane.resources.project import keys
from controlplane.resources.storage_pool import layers
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import Generation, KekWanted, SnapshotWanted

LOOK_SECONDS = 600
Backend = Literal["qsd", "spdk", "fake"]


class SnapshotProgram(Program[Snapshot, HostLinks]):
    """Owns one snapshot on its volume's host."""

    @step(within=timedelta(minutes=10))
    async def take(self) -> Outcome:
        """Have it taken; saying it again takes no second one."""
        document = await self._document()
        with refusals_park():
            success = carried_out(await self.world.hosts.ensure(self.subject.host_id, document))
        if success is None:
            return wait(seconds=1)
        async with self.tx() as tx:
            await self._learn(tx, success, document.generation.number)
            return tx.goto(self.keep)

    @step(within=None)
    async def keep(self) -> Outcome:
        """At rest: look now and then, and when told to."""
        if self.subject.state == "deleting":
            return wait()
        try:
            seen = await self.world.hosts.observe(self.subject.host_id, "snapshot", self.subject_id)
        except (HostUnreachable, HostKeyChanged):
            return wait(seconds=LOOK_SECONDS)
        if seen is None or seen.generation != await self._generation() or self.has_signal("snapshot"):
            return goto(self.take)
        return wait(seconds=LOOK_SECONDS)

    @step(within=timedelta(minutes=30))
    async def destroy(self) -> Outcome:
        """Remove it from the host, then its key if nothing else needs that, its room and its row."""
        if not self.has_subject:
            return done()
        if not await self._is_host_forgotten():
            generation = await self._generation()
            with refusals_park():
                gone = carried_out(await self.world.hosts.purge(self.subject.host_id, "snapshot", self.subject_id, generation))
            if gone is None:
                return wait(seconds=2)
        async with self.tx() as tx:
            snapshot = await self._locked(tx)
            await keys.forget(tx.session, snapshot.id)
            beside = await layers.beside(tx.session, snapshot.id)
            await layers.leave(tx.session, snapshot.id)
            for kind, subject in [("volume", snapshot.volume_id), *beside]:  # they may stand on less now, or on a merged layer
                self.signal(kind, subject, "snapshot")
            body = {"name": snapshot.name}
            await emit(tx.session, "snapshot.deleted", "snapshot", snapshot.id, project_id=snapshot.project_id, body={**body})
            await tx.session.delete(snapshot)
            await tx.session.flush()
            await wake_waiting(tx.session)
            return tx.done()

    async def _locked(self, tx: Tx) -> Snapshot:
        query = select(Snapshot).where(Snapshot.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    async def _generation(self) -> Generation:
        async with self.tx() as tx:
            return Generation(epoch=await epoch.current(tx.session), number=self.subject.generation)

    async def _is_host_forgotten(self) -> bool:
        async with self.tx() as tx:
            return bool(await tx.session.scalar(select(Host.is_forgotten).where(Host.id == self.subject.host_id)))

    async def _document(self) -> SnapshotWanted:
        async with self.tx() as tx:
            snapshot = await tx.session.get_one(Snapshot, self.subject_id)
            key = await keys.ensure_key(tx.session, self.world.sealer, snapshot.project_id)
            return SnapshotWanted(
                id=snapshot.id,
                generation=Generation(epoch=await epoch.current(tx.session), number=snapshot.generation),
                volume_id=snapshot.volume_id,
                backend=cast("Backend", snapshot.backend),
                kek=KekWanted(id=key.id, public_key=key.public_key),
            )

    async def _learn(self, tx: Tx, success: Succeeded, generation: int) -> None:
        snapshot = await self._locked(tx)
        observed = success.observed
        taken = observed.get("taken_unix_ms")
        if snapshot.state == "creating":
            snapshot.state = "available"
            snapshot.taken_at = datetime.fromtimestamp(taken / 1000, UTC) if isinstance(taken, int) and taken else func.now()
            snapshot.consistency = "frozen" if observed.get("consistency") == "frozen" else "crash"
            await emit(tx.session, "snapshot.taken", "snapshot", snapshot.id, project_id=snapshot.project_id)
        size = observed.get("size_bytes")
        if isinstance(size, int) and size:
            snapshot.size_bytes = size  # a growth that was asked for before may not have been carried out, or has been since
        snapshot.observed_generation = max(snapshot.observed_generation, generation)
        await layers.learn(tx.session, snapshot.id, snapshot.host_id, snapshot.pool, observed.get("layers") or ())
        await keys.record(tx.session, snapshot.id, snapshot.volume_id, observed.get("keys") or ())
