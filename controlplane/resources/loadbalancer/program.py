"""The life of a load balancer: edge hosts carry it, what they see is written down, and it drains before it goes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from sqlalchemy import delete, select, update

from controlplane.core.json import Json
from controlplane.documents import service as documents
from controlplane.events.service import emit
from controlplane.kernel import service as kernel
from controlplane.kernel.program import Outcome, Program, done, step
from controlplane.kernel.tx import Tx
from controlplane.models.address import Address
from controlplane.models.host_document import HostDocument
from controlplane.models.loadbalancer import Loadbalancer, LoadbalancerBackend
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.loadbalancer.document import KIND, NOTICES, plan
from controlplane.resources.loadbalancer.traffic import measured
from controlplane.resources.nic.service import remove_nics
from hostagent.protocol.verbs import BackendTraffic, Subject, TrafficObserved
from hostagent.protocol.wanted import Observed

LOOK_SECONDS = 30
SOON_SECONDS = 2


class Seen(NamedTuple):
    """What one edge says of the load balancer, and what each backend carried there."""

    observed: Observed
    carried: Sequence[BackendTraffic]


class LoadbalancerProgram(Program[Loadbalancer, HostLinks]):
    """Owns one load balancer."""

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: plan, look at the edges, write down what they say of each backend."""
        if not self.has_subject:
            return done()
        async with self.tx() as tx:
            edges = await plan(tx.session, await self._locked(tx), self.world.clock.now())
        seen = await self._look(edges)
        async with self.tx() as tx:
            row = await self._locked(tx)
            await self._note(tx, row, seen)
            is_done = await documents.is_carried_out(tx.session, KIND, row.id)
            if is_done and edges:
                row.observed_generation = max(row.observed_generation, self.subject.generation)
            return tx.wait(seconds=await self._delay(tx, row, is_done=is_done))

    @step(within=timedelta(days=2))
    async def destroy(self) -> Outcome:
        """Let open flows end, then take it off the edges, then give back addresses and row."""
        if not self.has_subject:
            return done()
        async with self.tx() as tx:
            row = await self._locked(tx)
            left = self._left(row)
            if left > 0:
                await plan(tx.session, row, self.world.clock.now())
                return tx.wait(seconds=min(left, LOOK_SECONDS))
            if await documents.withdraw(tx.session, KIND, row.id):
                await kernel.start(tx.session, NOTICES, "all")
            if not await documents.is_carried_out(tx.session, KIND, row.id):
                return tx.wait(seconds=SOON_SECONDS)
            await self._free(tx, row)
            return tx.done()

    # -- parts --------------------------------------------------------------------------------------------------------

    async def _locked(self, tx: Tx) -> Loadbalancer:
        query = select(Loadbalancer).where(Loadbalancer.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    def _left(self, row: Loadbalancer) -> float:
        """Seconds for which open flows may go on; none where no edge was ever told of it."""
        if row.deleting_at is None or not row.observed:
            return 0
        return row.drain_seconds - (self.world.clock.now() - row.deleting_at).total_seconds()

    async def _look(self, edges: list[str]) -> dict[str, Seen]:
        """What each edge that answers says; a silent one is left out."""
        found: dict[str, Seen] = {}
        hosts, subject = self.world.hosts, Subject(id=self.subject_id)
        for host_id in edges:
            try:
                seen = await hosts.observe(host_id, KIND, self.subject_id)
                if seen is not None:
                    carried: TrafficObserved = await hosts.call(host_id, "traffic.observe", subject)
                    found[host_id] = Seen(seen, carried.backends)
            except (HostUnreachable, HostKeyChanged, AgentError):
                continue
        return found

    async def _note(self, tx: Tx, row: Loadbalancer, seen: dict[str, Seen]) -> None:
        """Keep since when each backend is in its state; a change is an event."""
        moment = self.world.clock.now().astimezone(UTC)
        now = moment.isoformat()
        before = row.observed
        after: dict[str, Json] = {}
        for host_id, (observed, carried) in seen.items():
            known = before.get(host_id)
            states = known.get("backends") if isinstance(known, dict) else None
            kept = states if isinstance(states, dict) else {}
            backends: dict[str, Json] = {}
            for key, value in observed.detail.items():
                if not key.startswith("up:"):
                    continue
                nic_id, state = key.removeprefix("up:"), str(value)
                last = kept.get(nic_id)
                backends[nic_id] = last if isinstance(last, list) and last[0] == state else [state, now]
                if isinstance(last, list) and last[0] != state:
                    body = {"name": row.name, "backend": nic_id, "host_id": host_id, "before": last[0], "state": state}
                    await emit(tx.session, "loadbalancer.backend", KIND, row.id, project_id=row.project_id, body=body)
            rest: dict[str, Json] = {key: value for key, value in observed.detail.items() if not key.startswith("up:")}
            traffic = measured(carried, known.get("traffic") if isinstance(known, dict) else None, moment)
            after[host_id] = {"backends": backends, "detail": rest, "traffic": traffic}
        if after != before:
            row.observed = after

    async def _delay(self, tx: Tx, row: Loadbalancer, *, is_done: bool) -> float:
        """Until the next look: soon while edges are at it, or when an ejection ends."""
        ends = await next_end(tx, row.id)
        if ends is not None:
            return min(LOOK_SECONDS, max(1.0, (ends - self.world.clock.now()).total_seconds()))
        return LOOK_SECONDS if is_done and row.observed else SOON_SECONDS

    async def _free(self, tx: Tx, row: Loadbalancer) -> None:
        await firewalls.drop_owned(tx.session, row.id)
        await remove_nics(tx.session, row.id)
        mine = Address.loadbalancer_id == row.id
        query = update(Address).where(mine).values(loadbalancer_id=None, holder_id=None, generation=Address.generation + 1)
        for address_id in await tx.session.scalars(query.returning(Address.id)):
            await kernel.start(tx.session, "address", address_id)
        gone = delete(HostDocument).where(HostDocument.kind == KIND, HostDocument.object_id == row.id)
        await tx.session.execute(gone.where(HostDocument.applied_generation == HostDocument.generation))
        await documents.withdraw(tx.session, KIND, row.id, is_final=True)
        await emit(tx.session, "loadbalancer.deleted", KIND, row.id, project_id=row.project_id, body={"name": row.name})
        await tx.session.execute(delete(Loadbalancer).where(Loadbalancer.id == row.id))


async def next_end(tx: Tx, loadbalancer_id: str) -> datetime | None:
    """When the next ejection ends."""
    query = select(LoadbalancerBackend.ejected_until).where(
        LoadbalancerBackend.loadbalancer_id == loadbalancer_id, LoadbalancerBackend.ejected_until.is_not(None)
    )
    found = [moment for moment in await tx.session.scalars(query) if moment is not None]
    return min(found) if found else None
