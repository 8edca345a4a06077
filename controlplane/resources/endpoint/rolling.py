"""One look at a roll-out and what follows from it. The one rule: it decides by `rollout.decide` alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.events.service import emit
from controlplane.kernel.operation import fail
from controlplane.metering.latency import percentile_ms
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import RevisionTraffic
from controlplane.models.replica import Replica
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.resources.endpoint import revision as revisions
from controlplane.resources.endpoint.rollout import Body, Traffic, decide
from controlplane.resources.key.publish import publish
from controlplane.resources.replica import service as replicas


async def advance(session: AsyncSession, endpoint: Endpoint, here: Sequence[Replica]) -> bool:
    """Make, take away, change the share, go back; whether it is over."""
    now = await session.scalar(select(func.now()))
    assert isinstance(now, datetime)
    rollout = revisions.stored(endpoint)
    bodies = await _bodies(session, endpoint, here)
    traffic = await _traffic(session, endpoint, rollout.from_revision)
    move = decide(rollout, bodies, endpoint.replicas, traffic, now.timestamp())
    if move.back:
        await _go_back(session, endpoint, move.back)
        return False
    if revisions.store(endpoint, move.rollout):
        await publish(session, "routes")
    for _ in range(move.create):
        await replicas.create(session, endpoint)
    leaving = {body.id for body in move.remove}
    for replica in here:
        if replica.id in leaving:
            await replicas.remove(session, replica)
    if move.is_done:
        await revisions.finish(session, endpoint)
        await publish(session, "routes")
        kind = "endpoint.rolled_back" if move.rollout.is_back else "endpoint.rolled_out"
        body = {"name": endpoint.name, "revision": endpoint.revision}
        await emit(session, kind, "endpoint", endpoint.id, project_id=endpoint.project_id, body={**body})
    return move.is_done


async def _go_back(session: AsyncSession, endpoint: Endpoint, reason: str) -> None:
    failed = endpoint.revision
    await revisions.go_back(session, endpoint, reason)
    await publish(session, "routes")
    body = {"name": endpoint.name, "revision": failed, "reason": reason}
    await emit(session, "endpoint.rollout_failed", "endpoint", endpoint.id, project_id=endpoint.project_id, body={**body})
    await fail(session, endpoint.id, "endpoint.rolled_back", reason)


async def _bodies(session: AsyncSession, endpoint: Endpoint, here: Sequence[Replica]) -> list[Body]:
    vms = {vm.id: vm for vm in await session.scalars(select(Vm).where(Vm.id.in_([replica.vm_id for replica in here])))}
    subjects = [*(replica.id for replica in here), *vms]
    query = select(Run).where(Run.subject.in_(subjects), Run.finished_at.is_(None), Run.parked_at.is_not(None))
    parked = {run.subject: f"{run.parked_code}: {run.parked_detail}" for run in await session.scalars(query)}
    entered = select(Run.subject, Run.entered_at).where(Run.subject.in_(subjects), Run.finished_at.is_(None))
    since = {subject: at.timestamp() for subject, at in await session.execute(entered)}
    found: list[Body] = []
    for replica in here:
        vm = vms.get(replica.vm_id or "")
        is_parked = replica.id in parked or (replica.vm_id or "") in parked
        found.append(
            Body(
                id=replica.id,
                is_new=replica.revision == endpoint.revision,
                is_ready=replica.state == "ready",
                is_unhealthy=replica.state == "unhealthy",
                is_waiting=vm is not None and vm.state == "waiting",
                since=0.0 if is_parked else max(replica.created_at.timestamp(), since.get(replica.vm_id or "", 0.0)),
                failure=parked.get(replica.id) or parked.get(replica.vm_id or "") or replica.failure,
            )
        )
    return found


async def _traffic(session: AsyncSession, endpoint: Endpoint, before: int) -> tuple[Traffic, Traffic]:
    """What all gateways saw: of the present revision, and of the one before."""
    rows = list(await session.scalars(select(RevisionTraffic).where(RevisionTraffic.endpoint_id == endpoint.id)))
    return _sum(rows, endpoint.revision), _sum(rows, before)


def _sum(rows: Sequence[RevisionTraffic], number: int) -> Traffic:
    mine = [row for row in rows if row.revision == number]
    counts = [sum(column) for column in zip(*(row.ttft_counts for row in mine), strict=True)]
    return Traffic(
        requests=sum(row.requests for row in mine),
        failures=sum(row.failures for row in mine),
        ttft_p95_ms=percentile_ms(counts, 0.95),
        ttft_count=sum(counts),
    )
