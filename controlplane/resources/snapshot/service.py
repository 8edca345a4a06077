"""Changes of snapshots. The one rule: the volume writes to a fresh layer from then on, whose room is taken with the snapshot;
the closed one holds what it takes on disk, as soon as the host has said how much that is.
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.kernel import service as kernel
from controlplane.models.snapshot import Snapshot
from controlplane.models.volume import Volume
from controlplane.resources.snapshot.errors import (
    SnapshotDeleting,
    SnapshotHasClones,
    SnapshotLimitReached,
    SnapshotProtected,
    SnapshotVolumeNotReady,
    SnapshotVolumeUnknown,
)
from controlplane.resources.snapshot.schemas import SnapshotTake, SnapshotUpdate
from controlplane.resources.storage_pool import layers
from controlplane.resources.storage_pool import service as pools

PROGRAM = "snapshot"


async def volume_named(session: AsyncSession, project_id: str, ref: str) -> Volume:
    """The tenant's volume, kept from going meanwhile; raises SnapshotVolumeUnknown."""
    column = Volume.id if is_id(ref, Kind.VOLUME) else Volume.name
    query = select(Volume).where(column == ref, Volume.project_id == project_id, Volume.owner_id.is_(None))
    found = await session.scalar(query.with_for_update(key_share=True))
    if found is None:
        raise SnapshotVolumeUnknown(f"no volume {ref}", errors=(FieldError(pointer="/volume", detail=f"no volume {ref}"),))
    return found


async def take(session: AsyncSession, volume: Volume, wanted: SnapshotTake, *, most: int) -> Snapshot:
    """Begin to take it; the caller holds the volume's row. Raises the errors of this noun and StoragePoolNoSpace."""
    if volume.state != "available" or volume.host_id is None:
        raise SnapshotVolumeNotReady(f"{volume.name} is {volume.state}")
    count = await session.scalar(select(func.count()).select_from(Snapshot).where(Snapshot.project_id == volume.project_id))
    if (count or 0) >= most:
        raise SnapshotLimitReached(f"the project has {count} snapshots, {most} are the most")
    snapshot = Snapshot(
        id=new_id(Kind.SNAPSHOT),
        project_id=volume.project_id,
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
        is_protected=wanted.is_protected,
        volume_id=volume.id,
        volume_name=volume.name,
        size_bytes=volume.size_bytes,
        pool=volume.pool,
        backend=volume.backend,
        host_id=volume.host_id,
    )
    session.add(snapshot)
    await session.flush()
    if not await layers.close(session, volume, snapshot.id):
        short = await pools.shortage(session, volume.pool, volume.size_bytes, volume.host_id)
        raise pools.no_space(short, volume.pool)
    await kernel.start(session, PROGRAM, snapshot.id, host_id=volume.host_id)
    return snapshot


async def update(session: AsyncSession, snapshot: Snapshot, changes: SnapshotUpdate) -> Snapshot:
    if snapshot.state == "deleting":
        raise SnapshotDeleting(f"{snapshot.name} is being deleted")
    await kernel.start(session, PROGRAM, snapshot.id, host_id=snapshot.host_id)
    for name, value in changes.model_dump(exclude_unset=True).items():
        setattr(snapshot, name, value)
    return snapshot


async def remove(session: AsyncSession, snapshot: Snapshot) -> Snapshot:
    """Begin to delete; doing it twice is once. Raises SnapshotProtected, SnapshotHasClones."""
    if snapshot.state == "deleting":
        return snapshot
    if snapshot.is_protected:
        raise SnapshotProtected(f"{snapshot.name} is protected")
    await session.refresh(snapshot, with_for_update=True)  # a clone that is being made commits first, or sees that it is gone
    clones = list(await session.scalars(select(Volume.name).where(Volume.snapshot_id == snapshot.id).order_by(Volume.name)))
    if clones:
        words = f"{', '.join(clones[:5])}{' and more' if len(clones) > 5 else ''} began as {snapshot.name}"
        raise SnapshotHasClones(words, clones=[*clones[:100]])
    await kernel.start(session, PROGRAM, snapshot.id, host_id=snapshot.host_id)
    await kernel.destroy(session, PROGRAM, snapshot.id)
    snapshot.state, snapshot.deleting_at = "deleting", func.now()
    return snapshot
