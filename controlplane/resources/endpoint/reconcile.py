"""The autoscaler: each second, wanted replicas against what gateways say there is to do. One run for all: one worker at a time.

The one rule: it decides by `autoscale.decide` alone; what it remembers besides (the last minutes) only delays taking away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from prometheus_client import Gauge
from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.events.service import emit
from controlplane.kernel.reconcile import Reconciler
from controlplane.models.autoscaler import AutoscalerDecision, EndpointLoad
from controlplane.models.endpoint import Endpoint
from controlplane.models.replica import Replica
from controlplane.remote.link import HostLinks
from controlplane.resources.endpoint import service
from controlplane.resources.endpoint.autoscale import Decision, History, Policy, Seen, Window, decide

SILENT_SECONDS = 3
GONE_SECONDS = 600
START_SECONDS = 180.0  # of a replica, before one has been seen to start
_AGAIN_SECONDS = 10.0  # after a host was looked for in vain

REPLICAS = Gauge("bedplate_autoscaler_replicas", "Replicas by endpoint: wanted, ready.", ["endpoint", "kind"])


@dataclass(slots=True, kw_only=True)
class Memory:
    """Of one endpoint, in this process."""

    history: History
    refused_at: float = 0.0
    refused: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One autoscaled endpoint and what was seen of it."""

    endpoint: Endpoint
    seen: Seen


def policy_of(stored: dict[str, Any]) -> Policy:
    """What the row holds, as the arithmetic wants it."""
    windows = tuple(Window(**window) for window in stored.get("windows", ()))
    return Policy(**{**stored, "windows": windows})


class AutoscalerReconciler(Reconciler[str, HostLinks]):
    name: ClassVar[str] = "autoscaler"
    every: ClassVar[timedelta] = timedelta(seconds=1)
    memories: ClassVar[dict[str, Memory]] = {}

    async def reconcile(self) -> None:
        now = self.world.clock.now()
        async with self.tx() as tx:
            looks = await look(tx.session, now.timestamp())
        for gone in set(self.memories) - {one.endpoint.id for one in looks}:
            del self.memories[gone]
        for one in looks:
            began = History(began=one.seen.at)
            memory = self.memories.setdefault(one.endpoint.id, Memory(history=began))
            assert one.endpoint.autoscale is not None
            decision = decide(policy_of(one.endpoint.autoscale), memory.history, one.seen, now)
            REPLICAS.labels(one.endpoint.name, "wanted").set(decision.replicas)
            REPLICAS.labels(one.endpoint.name, "ready").set(one.seen.ready)
            if decision.replicas != one.seen.wanted and not self._is_refused(memory, decision, one.seen):
                await self._change(one, decision, memory)

    def _is_refused(self, memory: Memory, decision: Decision, seen: Seen) -> bool:
        """Whether the same was tried in vain a moment ago."""
        return decision.replicas == memory.refused and seen.at - memory.refused_at < _AGAIN_SECONDS

    async def _change(self, one: Look, decision: Decision, memory: Memory) -> None:
        async with self.tx() as tx:
            endpoint = (
                await tx.session.scalars(select(Endpoint).where(Endpoint.id == one.endpoint.id).with_for_update())
            ).one_or_none()
            if endpoint is None or endpoint.state != "active" or endpoint.replicas != one.seen.wanted:
                return  # changed meanwhile: the next look sees it
            shortage = await service.resize(tx.session, endpoint, decision.replicas)
            is_news = shortage is None or memory.refused != decision.replicas or endpoint.replicas != one.seen.wanted
            if shortage is not None:
                memory.refused, memory.refused_at = decision.replicas, one.seen.at
            else:
                memory.refused = 0
            if is_news:
                await _write(tx.session, endpoint, one.seen, decision, shortage)


async def look(session: AsyncSession, at: float) -> Sequence[Look]:
    """Every autoscaled endpoint with its load; `load` None where a gateway that spoke lately is silent, or none ever spoke."""
    rows = list(await session.scalars(select(Endpoint).where(Endpoint.autoscale.is_not(None), Endpoint.state == "active")))
    if not rows:
        return []
    await session.execute(delete(EndpointLoad).where(EndpointLoad.at < func.now() - timedelta(seconds=GONE_SECONDS)))
    loads = {row.endpoint_id: row for row in await session.execute(_LOADS)}
    replicas: dict[str, dict[str, int]] = {}
    starts = {row.endpoint_id: float(row.seconds) for row in await session.execute(_STARTS)}
    for endpoint_id, state, count in await session.execute(_REPLICAS.where(Replica.endpoint_id.in_([row.id for row in rows]))):
        replicas.setdefault(endpoint_id, {})[state] = count
    found: list[Look] = []
    for row in rows:
        load, here = loads.get(row.id), replicas.get(row.id, {})
        seen = Seen(
            at=at,
            load=None if load is None or load.is_silent else load.load,
            requests_per_second=0.0 if load is None else load.rate,
            idle_for=None if load is None or load.last_end is None else max(0.0, at - load.last_end.timestamp()),
            ready=here.get("ready", 0),
            starting=here.get("starting", 0),
            start_seconds=starts.get(row.id, START_SECONDS),
            wanted=row.replicas,
        )
        found.append(Look(endpoint=row, seen=seen))
    return found


_LOADS = select(
    EndpointLoad.endpoint_id,
    func.sum(EndpointLoad.in_flight + EndpointLoad.queued).label("load"),
    func.sum(EndpointLoad.requests_per_second).label("rate"),
    func.max(EndpointLoad.last_end_at).label("last_end"),
    func.bool_or(EndpointLoad.at < func.now() - timedelta(seconds=SILENT_SECONDS)).label("is_silent"),
).group_by(EndpointLoad.endpoint_id)

_STARTS = (
    select(Replica.endpoint_id, func.extract("epoch", func.max(Replica.ready_at - Replica.created_at)).label("seconds"))
    .where(Replica.ready_at.is_not(None))
    .group_by(Replica.endpoint_id)
)

_REPLICAS = select(Replica.endpoint_id, Replica.state, func.count()).group_by(Replica.endpoint_id, Replica.state)


async def _write(session: AsyncSession, endpoint: Endpoint, seen: Seen, decision: Decision, shortage: str | None) -> None:
    """The decision, readable: `4 → 6: panic mean 41.0 over target 8`."""
    reason = f"{seen.wanted} → {decision.replicas}: {decision.reason}"
    if shortage is not None:
        reason = f"{reason}; room for {endpoint.replicas}: {shortage}"
    inputs = {
        "load": seen.load,
        "requests_per_second": seen.requests_per_second,
        "idle_seconds": seen.idle_for,
        "ready": seen.ready,
        "starting": seen.starting,
    }
    row = AutoscalerDecision(
        id=new_id(Kind.DECISION),
        endpoint_id=endpoint.id,
        at=func.now(),
        replicas_before=seen.wanted,
        replicas_wanted=decision.replicas,
        replicas_after=endpoint.replicas,
        reason=reason,
        inputs={**inputs},
    )
    session.add(row)
    body = {"name": endpoint.name, "reason": reason, "before": seen.wanted, "after": endpoint.replicas}
    await emit(session, "endpoint.scaled", "endpoint", endpoint.id, project_id=endpoint.project_id, body={**body})
