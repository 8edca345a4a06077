"""Operations are written with a change; `kernel.operation` ends them.

The one rule: what needs no program is over in the request that asks for it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.ids import Kind, new_id
from controlplane.kernel.operation import ENDS, end, settle, unfinished
from controlplane.models.base import Base
from controlplane.models.operation import Operation

_RECORDED = "bedplate.operations"  # key in `session.info`: subject id → the operation of this session


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

    Earlier ones that were reached already end as such first; a delete supersedes what is left of them. Many parameters,
    because not every subject is a row of the frame that could be asked for them.
    """
    earlier = await unfinished(session, subject_id)
    if earlier:
        runs = await settle(session, earlier)
        if action.endswith(ENDS):
            for operation in earlier:
                await end(session, operation, "superseded", runs.get(subject_id))
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
    operation = await record(session, subject.__tablename__, subject.id, generation, action, actor, project_id=project_id)
    is_gone = not inspect(row).persistent
    is_observed = getattr(subject, "observed_generation", generation) >= generation
    if is_gone if action.endswith(ENDS) else is_observed:
        await end(session, operation, "succeeded")


def recorded(session: AsyncSession, subject_id: str) -> str | None:
    """The id of the operation that this session recorded for a subject."""
    return session.info.get(_RECORDED, {}).get(subject_id)
