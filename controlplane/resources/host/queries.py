"""Reads of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight


async def by_name_locked(session: AsyncSession, name: str) -> Host | None:
    return await session.scalar(select(Host).where(Host.name == name).with_for_update())


async def bootstrap_key(session: AsyncSession) -> BootstrapKey | None:
    return await session.get(BootstrapKey, "bootstrap")


async def old_preflights(session: AsyncSession) -> Sequence[str]:
    """Ids of those that are older than they are kept, a few at a time."""
    is_old = HostPreflight.created_at < func.now() - timedelta(days=1, hours=2)
    return list(await session.scalars(select(HostPreflight.id).where(is_old).order_by(HostPreflight.created_at).limit(20)))
