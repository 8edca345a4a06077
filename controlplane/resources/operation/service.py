"""Operations are written with a change and settled by what was observed since.

The one rule: an operation has no life of its own; its end follows from the subject's generations and its run, and is
written down the first time that anyone looks, or a later change of the subject is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.ids import Kind, new_id
from controlplane.models.base import Base
from controlplane.models.operation import Operation
from controlplane.models.run import Run
from controlplane.resources.operation import queries

_RECORDED = "bedplate.operations"  # key in `session.info`: subject id → the operation of this session

_ENDS = (".delete", ".remove")


async def record(  # noqa: PLR0917 - called with these six everywhere, in this order
    session: AsyncSession,
    subject_kind: str,
    subject_id: str,
    generation: int,
    action: str,
    actor: Actor,
    *,
    project_id: str | None = None,
) -> Operation:
    """Write the operation of a change that made `generation`.

    Earlier ones that were reached already end as such first; a delete supersedes what is left of them.
    """
    earlier = await queries.unfinished(session, subject_id)
    if earlier:
        await settle(session, earlier)
        if action.endswith(_ENDS):
            for operation in earlier:
                _end(operation, "superseded")
    operation = Operation(
        id=new_id(Kind.OPERATION),
        action=action,
        actor=actor.id,
        project_id=project_id,
        subject_kind=subject_kind,
        subject_id=subject_id,
        subject_generation=generation,
    )
    session.add(operation)
    await session.flush()
    session.info.setdefault(_RECORDED, {})[subject_id] = operation.id
    return operation


async def record_once(session: AsyncSession, row: Base, action: str, actor: Actor) -> None:
    """Like `record`, unless the service has recorded one for this row already; for the route frame."""
    subject: Any = row
    if recorded(session, subject.id) is not None:
        return
    generation, project_id = getattr(subject, "generation", 1), getattr(subject, "project_id", None)
    await record(session, subject.__tablename__, subject.id, generation, action, actor, project_id=project_id)


def recorded(session: AsyncSession, subject_id: str) -> str | None:
    """The id of the operation that this session recorded for a subject."""
    return session.info.get(_RECORDED, {}).get(subject_id)


async def settle(session: AsyncSession, operations: Sequence[Operation]) -> dict[str, Run]:
    """End what has come to its end among `operations`; returns the unfinished runs of their subjects.

    Programs may call it when they raise an observed generation; nothing is lost when they do not.
    """
    pending = sorted((item for item in operations if item.finished_at is None), key=lambda item: item.subject_kind)
    runs = await queries.runs(session, {item.subject_id for item in pending}) if pending else {}
    resumed = await queries.resumed(session, [run.id for run in runs.values() if run.parked_at is not None])
    failed = {subject: run for subject, run in runs.items() if run.parked_at is not None and run.id not in resumed}
    for kind, group in groupby(pending, key=lambda item: item.subject_kind):
        items = list(group)
        observed = await queries.observed(session, kind, {item.subject_id for item in items})
        for item in items:
            _settle_one(item, observed.get(item.subject_id), failed.get(item.subject_id))
    await session.flush()
    return runs


def _settle_one(operation: Operation, subject: queries.Observed | None, parked: Run | None) -> None:
    is_end = operation.action.endswith(_ENDS)
    if subject is None:
        _end(operation, "succeeded" if is_end else "superseded")
    elif not is_end and (subject.generation is None or subject.generation == operation.subject_generation):
        _end(operation, "succeeded")
    elif not is_end and subject.generation is not None and subject.generation > operation.subject_generation:
        _end(operation, "superseded")
    elif parked is not None and parked.parked_at is not None and not (is_end and parked.parked_at < operation.created_at):
        _end(operation, "failed", code=parked.parked_code or "internal", detail=parked.parked_detail)


def _end(operation: Operation, state: str, *, code: str | None = None, detail: str | None = None) -> None:
    if operation.finished_at is None:
        operation.state = state
        operation.finished_at = datetime.now(UTC)
        operation.error_code, operation.error_detail = code, detail
