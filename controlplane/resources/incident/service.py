"""Changes of incidents."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane import kernel
from controlplane.authz.service import Actor
from controlplane.models.incident import Incident


async def resolve(session: AsyncSession, incident: Incident, *, actor: Actor, now: datetime, resume: bool) -> None:
    """Close it; with `resume` its parked run tries again. Resolving twice is once."""
    if incident.resolved_at is None:
        incident.resolved_at, incident.resolved_by = now, actor.id
    if resume and incident.program is not None:
        await kernel.resume(session, incident.program, incident.subject)
