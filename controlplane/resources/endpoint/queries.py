"""Reading endpoints with all that the API shows of them: one query a kind, never one an endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.autoscaler import AutoscalerDecision
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import EndpointRevision
from controlplane.models.route import Route, RouteTarget
from controlplane.models.run import Run
from controlplane.resources.endpoint.revision import stored
from controlplane.resources.replica import queries as replicas
from controlplane.resources.replica.queries import ShownReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: Literal["true", "false", "unknown"]
    reason: str = ""
    message: str = ""
    since: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    step: str
    attempt: int
    deadline_at: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownObserved:
    ready_replicas: int
    isolation: str
    isolation_reason: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownEndpoint:
    """An endpoint; other attributes are the row's, read when the answer is written."""

    row: Endpoint
    replicas: Sequence[ShownReplica]
    routes: Sequence[str]
    run: Run | None
    failed: EndpointRevision | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def ready(self) -> int:
        return sum(replica.row.state == "ready" for replica in self.replicas)

    @property
    def is_waiting(self) -> bool:
        """Whether a replica waits for room."""
        return any(replica.vm is not None and replica.vm.state == "waiting" for replica in self.replicas)

    @property
    def status(self) -> str:
        row = self.row
        if row.state == "deleting":
            return "deleting"
        if row.replicas == 0:
            return "idle"
        if self.ready >= row.replicas:
            return "ready"
        if self.ready:
            return "degraded"
        return "waiting" if self.is_waiting else "starting"

    @property
    def wanted(self) -> Any:
        return self.row

    @property
    def observed(self) -> ShownObserved:
        row = self.row
        return ShownObserved(
            ready_replicas=self.ready,
            isolation=str(row.spec["isolation"]),
            isolation_reason=str(row.spec.get("isolation_reason", "")),
            generation=row.observed_generation,
        )

    @property
    def conditions(self) -> list[Said]:
        row = self.row
        said = [self._placed()]
        if self.ready >= row.replicas:
            said.append(Said(type="Ready", status="true"))
        else:
            words = [
                f"{replica.short_id}: {replica.reason or replica.step}"
                for replica in self.replicas
                if replica.row.state != "ready"
            ]
            message = f"{self.ready} of {row.replicas} replicas are ready. {'; '.join(words)}".strip()
            said.append(Said(type="Ready", status="false", reason="endpoint.replicas_missing", message=message))
        return [*said, self._rolled_out()]

    def _rolled_out(self) -> Said:
        """Whether all replicas are of the wanted revision, and what became of the last one that was not kept."""
        row, rollout = self.row, self.row.rollout
        kind: dict[str, Any] = {"type": "RolledOut", "status": "false"}
        failed = "" if self.failed is None else f"revision {self.failed.number} was taken back: {self.failed.failure}"
        if rollout is None:
            return (
                Said(**kind, reason="endpoint.rolled_back", message=failed) if failed else Said(type="RolledOut", status="true")
            )
        made = sum(replica.row.revision == row.revision and replica.row.state == "ready" for replica in self.replicas)
        words = [f"revision {row.revision}: {made} of {row.replicas} replicas are ready"]
        if rollout["share"] is not None:
            words.append(f"{rollout['share']:g} % of the requests go there")
        if rollout["promoted_at"] is None:
            held = stored(row).strategy.is_held
            words.append("held until `endpoint promote`" if held else "watched before the others follow")
        if rollout["is_back"]:
            return Said(**kind, reason="endpoint.rolled_back", message=f"{failed}; {'; '.join(words)}")
        return Said(**kind, reason="endpoint.rolling_out", message="; ".join(words))

    def _placed(self) -> Said:
        if self.row.shortage is not None:
            message = str(self.row.shortage.get("detail", ""))
            return Said(type="Placed", status="false", reason="endpoint.no_capacity", message=message)
        shortages = [replica.vm.shortage for replica in self.replicas if replica.vm is not None and replica.vm.shortage]
        if not shortages:
            return Said(type="Placed", status="true")
        return Said(type="Placed", status="false", reason="endpoint.no_capacity", message=str(shortages[0].get("detail", "")))

    @property
    def progress(self) -> ShownProgress | None:
        run = self.run
        if run is None or run.parked_at is not None or run.deadline_at is None:
            return None
        return ShownProgress(step=run.step, attempt=run.attempt, deadline_at=run.deadline_at)


async def shown(session: AsyncSession, endpoints: Iterable[Endpoint]) -> list[ShownEndpoint]:
    rows = list(endpoints)
    ids = [row.id for row in rows]
    found = await replicas.of_endpoints(session, ids)
    names: dict[str, list[str]] = {endpoint_id: [] for endpoint_id in ids}
    routes_query = (
        select(RouteTarget.endpoint_id, Route.name)
        .join(Route, Route.id == RouteTarget.route_id)
        .where(RouteTarget.endpoint_id.in_(ids))
        .order_by(Route.name)
    )
    for endpoint_id, name in await session.execute(routes_query):
        names[endpoint_id].append(name)
    runs_query = select(Run).where(Run.program == "endpoint", Run.subject.in_(ids), Run.finished_at.is_(None))
    runs = {run.subject: run for run in await session.scalars(runs_query.execution_options(populate_existing=True))}
    failed = await failures(session, ids)
    return [
        ShownEndpoint(row=row, replicas=found[row.id], routes=names[row.id], run=runs.get(row.id), failed=failed.get(row.id))
        for row in rows
    ]


async def failures(session: AsyncSession, endpoint_ids: Sequence[str]) -> dict[str, EndpointRevision]:
    """The latest revision of each endpoint, where it was taken back."""
    latest = (
        select(EndpointRevision)
        .where(EndpointRevision.endpoint_id.in_(endpoint_ids))
        .ext(distinct_on(EndpointRevision.endpoint_id))
        .order_by(EndpointRevision.endpoint_id, EndpointRevision.number.desc())
    )
    return {row.endpoint_id: row for row in await session.scalars(latest) if row.failure}


async def revisions(session: AsyncSession, endpoint_id: str) -> Sequence[EndpointRevision]:
    """Those that are kept, the latest first."""
    query = select(EndpointRevision).where(EndpointRevision.endpoint_id == endpoint_id).order_by(EndpointRevision.number.desc())
    return list(await session.scalars(query))


async def show(session: AsyncSession, endpoint: Endpoint) -> ShownEndpoint:
    (one,) = await shown(session, [endpoint])
    return one


async def decisions(session: AsyncSession, endpoint_id: str, limit: int) -> Sequence[AutoscalerDecision]:
    """What the autoscaler decided, the latest first."""
    query = (
        select(AutoscalerDecision)
        .where(AutoscalerDecision.endpoint_id == endpoint_id)
        .order_by(AutoscalerDecision.id.desc())
        .limit(limit)
    )
    return list(await session.scalars(query))
