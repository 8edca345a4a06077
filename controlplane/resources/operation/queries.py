"""Reads of operations, their subjects and their subjects' runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.base import Base
from controlplane.models.operation import Operation
from controlplane.models.run import Run
from controlplane.models.signal import Signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Where a subject has got to; `generation` None: it keeps none, so whatever is written is true at once."""

    generation: int | None


async def unfinished(session: AsyncSession, subject_id: str) -> Sequence[Operation]:
    """The subject's operations without an end, oldest first, locked."""
    query = select(Operation).where(Operation.subject_id == subject_id, Operation.finished_at.is_(None))
    fresh = query.order_by(Operation.id).with_for_update().execution_options(populate_existing=True)
    return (await session.scalars(fresh)).all()


async def observed(session: AsyncSession, kind: str, ids: Collection[str]) -> dict[str, Observed]:
    """The observed generation of each subject that still exists; the noun is the table's name."""
    model = _model(kind)
    if model is None:
        return {}
    columns: Any = model
    has_generation = hasattr(model, "observed_generation")
    query = select(columns.id, columns.observed_generation) if has_generation else select(columns.id, columns.id)
    rows = (await session.execute(query.where(columns.id.in_(ids)))).all()
    return {row[0]: Observed(generation=row[1] if has_generation else None) for row in rows}


def _model(kind: str) -> type[Base] | None:
    for mapper in Base.registry.mappers:
        if mapper.local_table is not None and getattr(mapper.local_table, "name", None) == kind:
            return mapper.class_
    return None


async def runs(session: AsyncSession, subject_ids: Collection[str]) -> dict[str, Run]:
    """The unfinished run of each subject that has one."""
    query = select(Run).where(Run.subject.in_(subject_ids), Run.finished_at.is_(None))
    fresh = query.order_by(Run.id).execution_options(populate_existing=True)  # a long poll looks again in one session
    return {run.subject: run for run in await session.scalars(fresh)}


async def resumed(session: AsyncSession, run_ids: Collection[str]) -> set[str]:
    """The parked runs that were told to try again, or to end, and have not begun to."""
    if not run_ids:
        return set()
    told = Signal.run_id.in_(run_ids), Signal.kind.in_(("resume", "destroy")), Signal.seen_at.is_(None)
    return set(await session.scalars(select(Signal.run_id).where(*told)))
