"""Reads of hosts."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host


async def by_name_locked(session: AsyncSession, name: str) -> Host | None:
    return await session.scalar(select(Host).where(Host.name == name).with_for_update())


async def bootstrap_key(session: AsyncSession) -> BootstrapKey | None:
    return await session.get(BootstrapKey, "bootstrap")
