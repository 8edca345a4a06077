"""What happened, for watchers. The one rule: an event is emitted in the transaction of what it tells about."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.core.json import JsonObject
from controlplane.models.event import Event


async def emit(
    session: AsyncSession,
    kind: str,
    subject_kind: str,
    subject_id: str,
    *,
    project_id: str | None = None,
    body: JsonObject | None = None,
) -> None:
    """Add one event (`vm.create`, `vm.running`) to the session; watchers see it after commit, within about 0.2 s."""
    event = Event(
        id=new_id(Kind.EVENT),
        kind=kind,
        project_id=project_id,
        subject_kind=subject_kind,
        subject_id=subject_id,
        body=body or {},
    )
    session.add(event)
    await session.flush()
