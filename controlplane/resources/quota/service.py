"""Keeping a project within its quota. The one rule: whoever takes something asks here first, in the transaction that takes it.

Those who ask for one project queue up on its row until they commit, so two requests never share what is left. A project without
a quota is not locked.
"""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.project import Project
from controlplane.resources.quota.errors import QuotaExceeded
from controlplane.resources.quota.queries import usage


async def check(session: AsyncSession, project_id: str, **more: int) -> None:
    """Whether `more` of these resources may be taken; what gets less is never refused. Raises QuotaExceeded."""
    column = select(Project.quota).where(Project.id == project_id)
    if not await session.scalar(column):
        return
    limits = await session.scalar(column.with_for_update(key_share=True)) or {}
    used = await usage(session, project_id)
    over = [name for name, count in more.items() if count > 0 and name in limits and used[name] + count > limits[name]]
    if over:
        words = ", ".join(f"{name}: {used[name]} of {limits[name]} used, {more[name]} more asked for" for name in over)
        raise QuotaExceeded(
            words, exceeded={name: {"limit": limits[name], "used": used[name], "asked": more[name]} for name in over}
        )
