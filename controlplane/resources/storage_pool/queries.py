"""Reads of storage pools, with what the API says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from controlplane.models.host import Host
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_layer import StorageLayer, StorageLayerUse
from controlplane.models.storage_pool import StoragePool
from controlplane.models.volume import Volume

MOST_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPool:
    row: StoragePool
    host: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def allocatable_bytes(self) -> int:
        row = self.row
        return max(min(row.total_bytes - row.reserved_bytes, row.free_bytes) - row.kept_free_bytes, 0)

    @property
    def conditions(self) -> list[Said]:
        row = self.row
        if not row.is_available:
            words = f"Host {self.host} does not see pool {row.name}: its disk is missing or not mounted."
            return [Said(type="Available", status="false", reason="storage_pool.missing", message=words, since=row.seen_at)]
        found = [Said(type="Available", status="true")]
        if row.is_low:
            found.append(Said(type="Low", status="true", reason="storage_pool.low", message=low_words(row, self.host)))
        return found


def low_words(row: StoragePool, host: str) -> str:
    percent = row.free_bytes * 100 // max(row.total_bytes, 1)
    return (
        f"Pool {row.name} of host {host} has {row.free_bytes} of {row.total_bytes} bytes left ({percent} %): "
        "nothing new is placed there. Delete volumes or snapshots, or add a disk."
    )


METRICS = (
    ("total_bytes", "Size of a storage pool, as its host last said."),
    ("free_bytes", "What of it is not written."),
    ("reserved_bytes", "What of it is promised to volumes and snapshots."),
    ("available", "1 while its host sees it."),
)


async def metrics_text(session: AsyncSession) -> str:
    """Every pool for Prometheus, as the database knows it."""
    query = select(StoragePool, Host.name).join(Host, Host.id == StoragePool.host_id).order_by(Host.name, StoragePool.name)
    rows = [(row[0], row[1]) for row in await session.execute(query)]
    lines: list[str] = []
    for name, words in METRICS:
        metric = f"bedplate_storage_pool_{name}"
        lines += [f"# HELP {metric} {words}", f"# TYPE {metric} gauge"]
        for pool, host in rows:
            value = int(pool.is_available) if name == "available" else getattr(pool, name)
            lines.append(f'{metric}{{host="{host}",pool="{pool.name}",id="{pool.id}"}} {value}')
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A volume or snapshot, with the bytes that its end alone would free."""

    id: str
    name: str
    project_id: str
    bytes: int
    purge_at: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimable:
    dry_run: bool
    freed_bytes: int
    volumes: Sequence[Held]
    snapshots: Sequence[Held]


async def retained(session: AsyncSession, pool: StoragePool) -> list[Volume]:
    """Volumes that were deleted and whose data is only kept, the oldest first."""
    here = Volume.host_id == pool.host_id, Volume.pool == pool.name, Volume.state == "retained"
    return list(await session.scalars(select(Volume).where(*here).order_by(Volume.deleting_at, Volume.id)))


async def reclaimable(session: AsyncSession, pool: StoragePool, *, dry_run: bool) -> Reclaimable:
    """What the end of all that is only retained would free, and the snapshots that hold most."""
    volumes = await retained(session, pool)
    alone = await _held_alone(session, [volume.id for volume in volumes])
    together = await _freed_with(session, [volume.id for volume in volumes])
    here = Snapshot.host_id == pool.host_id, Snapshot.pool == pool.name, Snapshot.state == "available"
    snapshots = list(await session.scalars(select(Snapshot).where(*here)))
    held = await _layer_bytes(session, [snapshot.id for snapshot in snapshots])
    largest = sorted(snapshots, key=lambda row: (-held.get(row.id, 0), row.id))[:MOST_NAMED]
    return Reclaimable(
        dry_run=dry_run,
        freed_bytes=together,
        volumes=[
            Held(id=row.id, name=row.name, project_id=row.project_id, bytes=alone.get(row.id, 0), purge_at=row.purge_at)
            for row in volumes
        ],
        snapshots=[Held(id=row.id, name=row.name, project_id=row.project_id, bytes=held.get(row.id, 0)) for row in largest],
    )


async def _held_alone(session: AsyncSession, subject_ids: list[str]) -> dict[str, int]:
    other = aliased(StorageLayerUse)
    is_shared = exists().where(other.layer_id == StorageLayer.id, other.subject_id != StorageLayerUse.subject_id)
    query = select(StorageLayerUse.subject_id, func.sum(StorageLayer.bytes))
    query = query.join(StorageLayer, StorageLayer.id == StorageLayerUse.layer_id)
    query = query.where(StorageLayerUse.subject_id.in_(subject_ids), ~is_shared).group_by(StorageLayerUse.subject_id)
    return {row[0]: int(row[1]) for row in await session.execute(query)}


async def _freed_with(session: AsyncSession, subject_ids: list[str]) -> int:
    """Of all together: what two of them share goes with the later one."""
    mine = select(StorageLayerUse.layer_id).where(StorageLayerUse.subject_id.in_(subject_ids))
    others = exists().where(StorageLayerUse.layer_id == StorageLayer.id, StorageLayerUse.subject_id.not_in(subject_ids))
    query = select(func.coalesce(func.sum(StorageLayer.bytes), 0)).where(StorageLayer.id.in_(mine), ~others)
    return int(await session.scalar(query) or 0)


async def _layer_bytes(session: AsyncSession, layer_ids: list[str]) -> dict[str, int]:
    """Of layers that were closed for these snapshots."""
    query = select(StorageLayer.id, StorageLayer.bytes).where(StorageLayer.id.in_(layer_ids))
    return {row[0]: row[1] for row in await session.execute(query)}


async def shown(session: AsyncSession, pools: Iterable[StoragePool]) -> Sequence[ShownPool]:
    rows = list(pools)
    names = select(Host.id, Host.name).where(Host.id.in_({row.host_id for row in rows}))
    hosts = {row[0]: row[1] for row in await session.execute(names)}
    return [ShownPool(row=row, host=hosts.get(row.host_id, "")) for row in rows]
