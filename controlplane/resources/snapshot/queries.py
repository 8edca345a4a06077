"""Reading snapshots with all that the API shows of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.run import Run
from controlplane.models.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    step: str
    attempt: int
    deadline_at: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSnapshot:
    """A snapshot with its host and run; other attributes are the row's, read when the answer is written."""

    row: Snapshot
    host_name: str
    run: Run | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def volume(self) -> str:
        return self.row.volume_name

    @property
    def status(self) -> str:
        if self.row.state == "creating" and self.run is not None and self.run.parked_at is not None:
            return "failed"
        return self.row.state

    @property
    def wanted(self) -> dict[str, Any]:
        return {"volume_id": self.row.volume_id, "size_bytes": self.row.size_bytes}

    @property
    def observed(self) -> dict[str, Any]:
        row = self.row
        return {
            "state": row.state,
            "taken_at": row.taken_at,
            "consistency": row.consistency,
            "host": self.host_name,
            "generation": row.observed_generation,
        }

    @property
    def conditions(self) -> list[Said]:
        return [ready(self.row.state == "available", self.run)]

    @property
    def progress(self) -> ShownProgress | None:
        return progress_of(self.run)


def ready(is_ready: bool, run: Run | None) -> Said:
    """Whether it is as wanted, and why not."""
    if run is not None and run.parked_at is not None:
        code, words = run.parked_code or "run.parked", run.parked_detail or ""
        return Said(type="Ready", status="false", reason=code, message=words, since=run.parked_at)
    if is_ready:
        return Said(type="Ready", status="true")
    if run is not None and run.last_error:
        return Said(type="Ready", status="false", reason="retrying", message=run.last_error)
    return Said(type="Ready", status="false", reason="in_progress", message="The last change is being carried out.")


def progress_of(run: Run | None) -> ShownProgress | None:
    if run is None or run.parked_at is not None or run.deadline_at is None:
        return None
    return ShownProgress(step=run.step, attempt=run.attempt, deadline_at=run.deadline_at)


async def runs_of(session: AsyncSession, program: str, ids: Iterable[str]) -> dict[str, Run]:
    """The unfinished run of each."""
    query = select(Run).where(Run.program == program, Run.subject.in_(list(ids)), Run.finished_at.is_(None))
    return {run.subject: run for run in await session.scalars(query.execution_options(populate_existing=True))}


async def shown(session: AsyncSession, snapshots: Iterable[Snapshot]) -> list[ShownSnapshot]:
    rows = list(snapshots)
    names = select(Host.id, Host.name).where(Host.id.in_({row.host_id for row in rows}))
    hosts = {row[0]: row[1] for row in await session.execute(names)}
    runs = await runs_of(session, "snapshot", [row.id for row in rows])
    return [ShownSnapshot(row=row, host_name=hosts.get(row.host_id, ""), run=runs.get(row.id)) for row in rows]


async def show(session: AsyncSession, snapshot: Snapshot) -> ShownSnapshot:
    (one,) = await shown(session, [snapshot])
    return one
