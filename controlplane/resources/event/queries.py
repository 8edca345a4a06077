"""Reads of events. The one rule: only events with a position are read, so none can appear behind a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.event import Event, EventHead

BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which events: of these projects, of kinds that begin with one of these, of one subject; None: of all."""

    project_ids: tuple[str, ...] | None = None
    kinds: tuple[str, ...] = ()
    subject_id: str | None = None


async def after(session: AsyncSession, position: int, wanted: Wanted) -> Sequence[Event]:
    """The next events behind `position`, at most BATCH, in order."""
    query = select(Event).where(Event.position > position)
    if wanted.project_ids is not None:
        query = query.where(Event.project_id.in_(wanted.project_ids))
    if wanted.subject_id is not None:
        query = query.where(Event.subject_id == wanted.subject_id)
    if wanted.kinds:
        query = query.where(or_(*(Event.kind.startswith(kind, autoescape=True) for kind in wanted.kinds)))
    return (await session.scalars(query.order_by(Event.position).limit(BATCH))).all()


async def head(session: AsyncSession) -> int:
    """The position of the newest event; 0 when there is none."""
    return await session.scalar(select(EventHead.position)) or 0


async def tail(session: AsyncSession) -> int:
    """The position of the oldest event that is kept; 0 when there is none."""
    return await session.scalar(select(func.coalesce(func.min(Event.position), 0))) or 0
