"""Operations are written with a change and settled by what was observed since.

The one rule: an operation has no life of its own; its state follows from the subject's generations and its run.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.ids import Kind, new_id
from controlplane.models.base import Base
from controlplane.models.operation import Operation

LATEST = "bedplate.operation"
"""Key in `session.info`: the id of the operation that this transaction recorded last."""


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
    """Write the operation of a change that made `generation`. A delete supersedes every unfinished one before it."""
    if action.endswith((".delete", ".remove")):
        await session.execute(
            update(Operation)
            .where(Operation.subject_id == subject_id, Operation.finished_at.is_(None))
            .values(state="superseded", finished_at=func.now())
        )
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
    session.info[LATEST] = operation.id
    return operation


async def record_once(session: AsyncSession, subject_kind: str, row: Base, action: str, actor: Actor) -> None:
    """Like `record`, unless the service has recorded one in this transaction already; for the route frame."""
    subject: Any = row
    if LATEST in session.info:
        return
    project_id = getattr(subject, "project_id", None)
    await record(session, subject_kind, subject.id, getattr(subject, "generation", 1), action, actor, project_id=project_id)
