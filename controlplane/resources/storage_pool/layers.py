"""The layers of volumes and snapshots, and the room that they hold.

The one rule: a pool's `reserved_bytes` is the sum of its layers' bytes, and both change in one transaction. A layer's row is
locked before anything is said to stand on it no more, so that of two that leave it at once the later one takes it away.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import delete, exists, literal, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, is_id
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_layer import StorageLayer, StorageLayerUse
from controlplane.models.volume import Volume
from controlplane.resources.storage_pool import service as pools

MOST_BYTES = 1 << 50
_QUIETLY = {"synchronize_session": False}


async def lay(session: AsyncSession, volume_id: str, host_id: str, pool: str, size_bytes: int) -> None:
    """The layer that a new volume writes to; its room has been taken."""
    await _make(session, volume_id, host_id, pool, size_bytes)
    await _stand(session, volume_id, [volume_id])


async def stand_on(session: AsyncSession, subject_id: str, source_id: str) -> None:
    """A clone stands on all that its snapshot does. The caller holds the snapshot's row."""
    await _stand(session, subject_id, await _under(session, source_id))


async def close(session: AsyncSession, volume: Volume, snapshot_id: str) -> bool:
    """The written layer is closed for the snapshot, and the volume writes to a fresh one. False: the pool lacks the room.

    The caller holds the volume's row.
    """
    assert volume.host_id is not None
    if not await pools.take(session, volume.host_id, volume.pool, volume.size_bytes):
        return False
    top = await session.get_one(StorageLayer, volume.id, with_for_update=True)
    closed_bytes, top.bytes = top.bytes, volume.size_bytes
    await session.flush()
    await _make(session, snapshot_id, volume.host_id, volume.pool, closed_bytes)
    below = [layer for layer in await _under(session, volume.id) if layer != volume.id]
    await _stand(session, volume.id, [snapshot_id])
    await _stand(session, snapshot_id, [*below, snapshot_id])
    return True


async def grow(session: AsyncSession, volume: Volume, more_bytes: int) -> bool:
    """False: the pool lacks the room."""
    assert volume.host_id is not None
    if not await pools.take(session, volume.host_id, volume.pool, more_bytes):
        return False
    here = update(StorageLayer).where(StorageLayer.id == volume.id).values(bytes=StorageLayer.bytes + more_bytes)
    await session.execute(here.execution_options(**_QUIETLY))
    return True


async def leave(session: AsyncSession, subject_id: str, layer_ids: Collection[str] | None = None) -> None:
    """It stands on those no more (None: on nothing), and what nothing stands on is off the disk, its room given back."""
    wanted = StorageLayerUse.subject_id == subject_id
    if layer_ids is not None:
        wanted &= StorageLayerUse.layer_id.in_(layer_ids)
    mine = select(StorageLayerUse.layer_id).where(wanted)
    held = select(StorageLayer.id).where(StorageLayer.id.in_(mine)).order_by(StorageLayer.id).with_for_update()
    left = list(await session.scalars(held))
    await session.execute(delete(StorageLayerUse).where(wanted).execution_options(**_QUIETLY))
    is_needed = exists().where(StorageLayerUse.layer_id == StorageLayer.id)
    gone = delete(StorageLayer).where(StorageLayer.id.in_(left), ~is_needed)
    gone = gone.returning(StorageLayer.host_id, StorageLayer.pool, StorageLayer.bytes)
    for host_id, pool, size_bytes in list(await session.execute(gone.execution_options(**_QUIETLY))):
        await pools.hold(session, host_id, pool, -size_bytes)


async def beside(session: AsyncSession, snapshot_id: str) -> list[tuple[str, str]]:
    """Who else stands on the layer that was closed for the snapshot, as (kind, id)."""
    others = StorageLayerUse.layer_id == snapshot_id, StorageLayerUse.subject_id != snapshot_id
    found = await session.scalars(select(StorageLayerUse.subject_id).where(*others).order_by(StorageLayerUse.subject_id))
    return [("snapshot" if is_id(subject, Kind.SNAPSHOT) else "volume", subject) for subject in found]


async def learn(session: AsyncSession, subject_id: str, host_id: str, pool: str, told: Sequence[Mapping[str, Any]]) -> None:
    """What the host says that a volume or snapshot stands on: merged layers are gone, closed ones hold what they take on disk.

    A written layer holds what its volume may reach, whatever the host says. What is just being snapshotted is not judged: the
    answer may be older than the request.
    """
    said = {str(item["id"]): min(max(int(item["bytes"]), 0), MOST_BYTES) for item in told}
    if not said:
        return
    under = set(await _under(session, subject_id))
    taking = set(await session.scalars(select(Snapshot.id).where(Snapshot.id.in_(under), Snapshot.state == "creating")))
    await leave(session, subject_id, under - said.keys() - taking)
    await _adopt(session, subject_id, host_id, pool, {layer: said[layer] for layer in said.keys() - under})
    closed = select(StorageLayer).where(StorageLayer.id.in_(said.keys()), StorageLayer.host_id == host_id)
    closed = closed.where(~exists().where(Volume.id == StorageLayer.id)).order_by(StorageLayer.id)
    for layer in await session.scalars(closed.with_for_update().execution_options(populate_existing=True)):
        more, layer.bytes = said[layer.id] - layer.bytes, said[layer.id]
        await pools.hold(session, layer.host_id, layer.pool, more)
    await session.flush()


async def _adopt(session: AsyncSession, subject_id: str, host_id: str, pool: str, said: Mapping[str, int]) -> None:
    """Layers that lie there though nobody here knew: it is so on the disk."""
    for layer_id, size_bytes in sorted(said.items()):
        values = {"id": layer_id, "host_id": host_id, "pool": pool, "bytes": size_bytes}
        made = insert(StorageLayer).values(**values).on_conflict_do_nothing().returning(StorageLayer.id)
        if await session.scalar(made) is not None:
            await pools.hold(session, host_id, pool, size_bytes)
    here = select(StorageLayer.id).where(StorageLayer.id.in_(said), StorageLayer.host_id == host_id)
    await _stand(session, subject_id, list(await session.scalars(here)))


async def _under(session: AsyncSession, subject_id: str) -> list[str]:
    query = select(StorageLayerUse.layer_id).where(StorageLayerUse.subject_id == subject_id)
    return list(await session.scalars(query.order_by(StorageLayerUse.layer_id)))


async def _make(session: AsyncSession, layer_id: str, host_id: str, pool: str, size_bytes: int) -> None:
    session.add(StorageLayer(id=layer_id, host_id=host_id, pool=pool, bytes=size_bytes))
    await session.flush()


async def _stand(session: AsyncSession, subject_id: str, layer_ids: Sequence[str]) -> None:
    rows = select(literal(subject_id), StorageLayer.id).where(StorageLayer.id.in_(layer_ids))
    made = insert(StorageLayerUse).from_select(["subject_id", "layer_id"], rows).on_conflict_do_nothing()
    await session.execute(made)
