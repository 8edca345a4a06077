"""The deployment's epoch: the first half of every generation that a host is told."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.deployment import Deployment

FIRST = 1


async def current(session: AsyncSession) -> int:
    """1 until a backup was restored."""
    return await session.scalar(select(Deployment.epoch)) or FIRST
