"""Reads of tokens."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import is_id
from controlplane.models.project import Project


async def project(session: AsyncSession, ref: str) -> Project | None:
    """The project with this name or id, kept from being deleted until the transaction ends."""
    column = Project.id if is_id(ref) else Project.name
    return await session.scalar(select(Project).where(column == ref).with_for_update(read=True, key_share=True))
