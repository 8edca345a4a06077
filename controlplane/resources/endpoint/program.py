"""The life of an endpoint: as many replicas as are wanted, made and taken away one by one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import delete, select

from controlplane.events.service import emit
from controlplane.kernel.program import Outcome, Program, done, step
from controlplane.kernel.tx import Tx
from controlplane.models.endpoint import Endpoint
from controlplane.models.replica import Replica
from controlplane.remote.link import HostLinks
from controlplane.resources.endpoint.rolling import advance
from controlplane.resources.endpoint.service import forget_routes
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.key.publish import publish
from controlplane.resources.replica import service as replicas

LOOK_SECONDS = 60
ROLL_SECONDS = 1


class EndpointProgram(Program[Endpoint, HostLinks]):
    """Owns an endpoint; its replicas live by programs of their own and tell it when they change."""

    @step(within=timedelta(minutes=10))
    async def scale(self) -> Outcome:
        """Make what is missing, take away what is too much: first what is not ready, then the newest."""
        async with self.tx() as tx:
            endpoint = await self._locked(tx)
            if endpoint.rollout is not None:
                return tx.goto(self.roll)
            here = [replica for replica in await self._replicas(tx) if replica.state != "deleting"]
            for _ in range(endpoint.replicas - len(here)):
                await replicas.create(tx.session, endpoint)
            for replica in _too_many(here, len(here) - endpoint.replicas):
                await replicas.remove(tx.session, replica)
            return tx.goto(self.serve)

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: count, and say so; scale again when the number is another than wanted."""
        async with self.tx() as tx:
            endpoint = await self._locked(tx)
            here = [replica for replica in await self._replicas(tx) if replica.state != "deleting"]
            if endpoint.rollout is not None:
                return tx.goto(self.roll)
            if len(here) != endpoint.replicas:
                return tx.goto(self.scale)
            if await self._count(tx, endpoint, here):
                endpoint.observed_generation = endpoint.generation
            return tx.wait(seconds=LOOK_SECONDS)

    @step(within=None)
    async def roll(self) -> Outcome:
        """Exchange replicas for those of the present revision, a few at a time; back to the former ones when they fail."""
        async with self.tx() as tx:
            endpoint = await self._locked(tx)
            if endpoint.rollout is None:
                return tx.goto(self.scale)
            here = [replica for replica in await self._replicas(tx) if replica.state != "deleting"]
            await self._count(tx, endpoint, here)
            if await advance(tx.session, endpoint, here):
                return tx.goto(self.scale)
            return tx.wait(seconds=ROLL_SECONDS)

    @step(within=timedelta(minutes=30))
    async def destroy(self) -> Outcome:
        """Routes first, so that nothing is sent here; then the replicas; then the row."""
        if not self.has_subject:
            return done()
        async with self.tx() as tx:
            endpoint = await self._locked(tx)
            left = await self._replicas(tx)
            await forget_routes(tx.session, endpoint.id)
            for replica in left:
                await replicas.remove(tx.session, replica)
            await publish(tx.session, "routes")
            if left:
                return tx.wait(seconds=LOOK_SECONDS)
            body = {"name": endpoint.name}
            await emit(tx.session, "endpoint.deleted", "endpoint", endpoint.id, project_id=endpoint.project_id, body={**body})
            await firewalls.drop_owned(tx.session, endpoint.id)
            await tx.session.execute(delete(Endpoint).where(Endpoint.id == endpoint.id))
            return tx.done()

    async def _count(self, tx: Tx, endpoint: Endpoint, here: Sequence[Replica]) -> bool:
        """Count who is ready, and say so when that has changed; whether they are as many as wanted."""
        ready = sum(replica.state == "ready" for replica in here)
        if ready != endpoint.ready_replicas:
            body = {"name": endpoint.name, "ready": ready, "wanted": endpoint.replicas}
            kind = "endpoint.ready" if ready >= endpoint.replicas else "endpoint.degraded"
            await emit(tx.session, kind, "endpoint", endpoint.id, project_id=endpoint.project_id, body={**body})
        endpoint.ready_replicas = ready
        return ready >= endpoint.replicas

    async def _locked(self, tx: Tx) -> Endpoint:
        query = select(Endpoint).where(Endpoint.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    async def _replicas(self, tx: Tx) -> Sequence[Replica]:
        query = (
            select(Replica).where(Replica.endpoint_id == self.subject_id).order_by(Replica.id).with_for_update(key_share=True)
        )
        return list(await tx.session.scalars(query))


def _too_many(here: Sequence[Replica], count: int) -> Sequence[Replica]:
    """The ones to take away: what is not ready before what is, the newest of those first."""
    if count <= 0:
        return ()
    idle = [replica for replica in here if replica.state != "ready"]
    serving = sorted((replica for replica in here if replica.state == "ready"), key=lambda replica: replica.id, reverse=True)
    return [*idle, *serving][:count]
