"""Reads of models: the catalogue's entries beside the rows of those that were imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.model import Model
from controlplane.models.run import Run
from controlplane.resources.model.plan import Plan, workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    step: str
    attempt: int
    deadline_at: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownModel:
    """A plan with its row and the row's run, when there are."""

    plan: Plan
    row: Model | None
    run: Run | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan.model, name)

    @property
    def id(self) -> str | None:
        return None if self.row is None else self.row.id

    @property
    def engine(self) -> str:
        return self.plan.engine.name

    @property
    def isolations(self) -> tuple[str, ...]:
        return self.plan.engine.isolations

    @property
    def size_bytes(self) -> int:
        return self.plan.size_bytes

    @property
    def vcpus(self) -> int:
        return self.plan.model.shape.vcpus

    @property
    def memory(self) -> Any:
        return self.plan.memory(self.isolations[0])

    @property
    def memory_bytes(self) -> int:
        return self.plan.memory_bytes(self.isolations[0])

    @property
    def argv(self) -> Any:
        return workload(self.plan, vcpus=self.vcpus, weights_image_id="")["argv"]

    @property
    def state(self) -> str:
        return "in_catalogue" if self.row is None else self.row.state

    @property
    def created_at(self) -> Any:
        return None if self.row is None else self.row.created_at

    @property
    def progress(self) -> ShownProgress | None:
        run = self.run
        if run is None or run.parked_at is not None or self.state == "available":
            return None
        return ShownProgress(step=run.step, attempt=run.attempt, deadline_at=run.deadline_at)

    @property
    def fetched_bytes(self) -> int:
        return 0 if self.row is None else self.row.fetched_bytes

    @property
    def failure(self) -> str | None:
        run = self.run
        if run is None or self.state == "available":
            return None
        return run.parked_detail if run.parked_at is not None else run.last_error


async def shown(session: AsyncSession, plans: list[Plan]) -> list[ShownModel]:
    names = [plan.model.name for plan in plans]
    rows = {row.name: row for row in await session.scalars(select(Model).where(Model.name.in_(names)))}
    ids = [row.id for row in rows.values()]
    runs_query = select(Run).where(Run.program == "model", Run.subject.in_(ids), Run.finished_at.is_(None))
    runs = {run.subject: run for run in await session.scalars(runs_query.execution_options(populate_existing=True))}
    found = []
    for plan in plans:
        row = rows.get(plan.model.name)
        found.append(ShownModel(plan=plan, row=row, run=runs.get(row.id) if row is not None else None))
    return found
