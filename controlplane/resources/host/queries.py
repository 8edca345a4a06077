"""Reads of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.bootstrap_key import BootstrapKey
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight
from controlplane.models.run import Run
from controlplane.models.snapshot import Snapshot
from controlplane.models.volume import Volume


async def by_name_locked(session: AsyncSession, name: str) -> Host | None:
    return await session.scalar(select(Host).where(Host.name == name).with_for_update())


async def bootstrap_key(session: AsyncSession) -> BootstrapKey | None:
    return await session.get(BootstrapKey, "bootstrap")


async def disks_on(session: AsyncSession, host_id: str) -> Sequence[str]:
    """Names of volumes and snapshots whose data lies there, a few."""
    found: list[str] = []
    for model in (Volume, Snapshot):
        found += await session.scalars(select(model.name).where(model.host_id == host_id).order_by(model.name).limit(5))
    return found


async def failed_preflights(session: AsyncSession, address: str, port: int) -> Sequence[str]:
    """Ids of those of this place that failed for good."""
    parked = select(Run.subject).where(Run.program == "host_preflight", Run.finished_at.is_(None), Run.parked_at.is_not(None))
    here = HostPreflight.address == address, HostPreflight.port == port
    return list(await session.scalars(select(HostPreflight.id).where(*here, HostPreflight.id.in_(parked))))


async def old_preflights(session: AsyncSession) -> Sequence[str]:
    """Ids of those that are older than they are kept, a few at a time."""
    is_old = HostPreflight.created_at < func.now() - timedelta(days=1, hours=2)
    return list(await session.scalars(select(HostPreflight.id).where(is_old).order_by(HostPreflight.created_at).limit(20)))
