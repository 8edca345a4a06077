"""The ends of operations, and the steps their runs went through.

The one rule: an operation has no life of its own; its end follows from the subject's generations and its run. It is written
in the transaction that brings it about (the step's that raises `observed_generation` or removes the row, or right after a
run parked), and by whoever looks for what nobody's step brought about.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, cast

from sqlalchemy import exists, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.models.base import Base
from controlplane.models.operation import Operation
from controlplane.models.run import Run
from controlplane.models.signal import Signal

ENDS = (".delete", ".remove")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A step that a run has left. `state`: `done`, `rested`, `failed` (it parked) or `cut` (the end was asked for)."""

    name: str
    started_at: datetime
    finished_at: datetime
    tries: int
    state: str
    code: str | None

    @classmethod
    def of(cls, entry: Json) -> Past:
        """From an entry of `run.history` or `operation.steps`, see `kernel.sql`."""
        name, since, until, tries, state, code = cast("tuple[str, float, float, int, str, str | None]", entry)
        moments = (datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until, UTC))
        return cls(name=name, started_at=moments[0], finished_at=moments[1], tries=tries, state=state, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Where a subject has got to; `generation` None: it keeps none, so whatever is written is true at once."""

    generation: int | None


async def settle(session: AsyncSession, operations: Sequence[Operation]) -> dict[str, Run]:
    """End what has come to its end among `operations`; returns the unfinished runs of their subjects."""
    pending = sorted((item for item in operations if item.finished_at is None), key=lambda item: item.subject_kind)
    runs, failed = await _unfinished_runs(session, {(item.subject_kind, item.subject_id) for item in pending})
    for kind, group in groupby(pending, key=lambda item: item.subject_kind):
        items = list(group)
        observed = await _observed(session, kind, {item.subject_id for item in items})
        for item in items:
            subject, parked = observed.get(item.subject_id), failed.get(item.subject_id)
            if (state := _end_of(item, subject, parked)) is not None:
                await end(session, item, state, runs.get(item.subject_id))
    return runs


async def settle_subject(
    session: AsyncSession, subject_id: str, run_id: str | None = None, *, is_in_step: bool = False
) -> None:
    """End the operations of one subject that are over now; for steps, in the transaction that made it so.

    `is_in_step`: the step that does so goes on in itself (it waits), so it belongs to what happened.
    """
    pending = await unfinished(session, subject_id)
    if not pending:
        return
    await settle(session, pending)
    run = await session.get(Run, run_id, populate_existing=True) if run_id is not None else None
    if run is not None:
        for item in pending:
            if item.finished_at is not None and item.subject_kind == run.program:
                present = _present(item, run, item.finished_at) if is_in_step and item.state == "succeeded" else []
                item.steps = steps_of(item, run) + present
    await session.flush()


async def unfinished(session: AsyncSession, subject_id: str) -> Sequence[Operation]:
    """The subject's operations without an end, oldest first, locked."""
    query = select(Operation).where(Operation.subject_id == subject_id, Operation.finished_at.is_(None))
    fresh = query.order_by(Operation.id).with_for_update().execution_options(populate_existing=True)
    return (await session.scalars(fresh)).all()


def steps_of(operation: Operation, run: Run) -> list[Json]:
    """What of a run's history belongs to an operation: what it left since, but for the rest it was found in."""
    since = operation.created_at.timestamp() - 0.001  # history has milliseconds
    entries = [cast("list[Any]", entry) for entry in run.history]
    return [entry for entry in entries if (entry[1] if entry[4] == "rested" else entry[2]) >= since]


def _present(operation: Operation, run: Run, now: datetime) -> list[Json]:
    since = max(run.entered_at, operation.created_at).timestamp()
    return [[run.step, round(since, 3), round(now.timestamp(), 3), run.failures + 1, "done", run.failed_code]]


async def end(session: AsyncSession, operation: Operation, state: str, run: Run | None = None) -> None:
    """Write an end down; the first one counts. A parked run's code and time are the operation's."""
    if operation.finished_at is not None:
        return
    if run is not None:
        operation.steps = steps_of(operation, run)
    if state == "failed" and run is not None and run.parked_at is not None:
        operation.finished_at = max(run.parked_at, operation.created_at)
        operation.error_code, operation.error_detail = run.parked_code or "internal", run.parked_detail
    else:
        operation.finished_at = await session.scalar(select(func.clock_timestamp()).execution_options(autoflush=False))
    operation.state = state
    await session.flush()


async def fail(session: AsyncSession, subject_id: str, code: str, detail: str) -> None:
    """End the subject's operations as failed, for a step that gave up what they asked for and goes on."""
    for operation in await unfinished(session, subject_id):
        at = await session.scalar(select(func.clock_timestamp()).execution_options(autoflush=False))
        operation.finished_at, operation.state = at, "failed"
        operation.error_code, operation.error_detail = code, detail
        await session.flush()


def _end_of(operation: Operation, subject: Observed | None, parked: Run | None) -> str | None:
    """The state that an operation has come to; None: it goes on."""
    is_end = operation.action.endswith(ENDS)
    if subject is None:
        return "succeeded" if is_end else "superseded"
    if not is_end and (subject.generation is None or subject.generation == operation.subject_generation):
        return "succeeded"
    if not is_end and subject.generation is not None and subject.generation > operation.subject_generation:
        return "superseded"
    if parked is not None and parked.parked_at is not None and not (is_end and parked.parked_at < operation.created_at):
        return "failed"
    return None


async def _observed(session: AsyncSession, kind: str, ids: Collection[str]) -> dict[str, Observed]:
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


async def _unfinished_runs(
    session: AsyncSession, subjects: Collection[tuple[str, str]]
) -> tuple[dict[str, Run], dict[str, Run]]:
    """The unfinished run of each subject that has one (of the program that is called like the noun), and those that failed:
    parked, and not told since to try again or to end. One statement, as a claim takes the park and the order away together.
    """
    if not subjects:
        return {}, {}
    is_told = exists().where(Signal.run_id == Run.id, Signal.kind.in_(("resume", "destroy")), Signal.seen_at.is_(None))
    query = select(Run, is_told).where(tuple_(Run.program, Run.subject).in_(subjects), Run.finished_at.is_(None))
    fresh = query.execution_options(populate_existing=True)  # a long poll looks again in one session
    rows = (await session.execute(fresh)).all()
    runs = {run.subject: run for run, _ in rows}
    return runs, {run.subject: run for run, told in rows if run.parked_at is not None and not told}
