"""Learning pools, and giving their room away. The one rule: the check and the taking are one statement on the pool's row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.kernel.incident import open_incident, resolve_incident
from controlplane.models.host import Host
from controlplane.models.storage_layer import StorageLayer
from controlplane.models.storage_pool import ROOM, StoragePool
from controlplane.resources.storage_pool.errors import StoragePoolNoSpace
from controlplane.resources.storage_pool.queries import low_words, retained
from hostagent.protocol.facts import HostFacts, PoolFact

PRIMARY = "primary"
LOW = "storage_pool.low"
MISSING = "storage_pool.missing"
MOST_TRIES = 1000


async def learn(session: AsyncSession, host: Host, facts: HostFacts, now: datetime) -> None:
    """The host's pools as it sees them; those that it does not name any more are not available. Alarms follow."""
    found = facts.pools or (
        PoolFact(
            name=PRIMARY, total_bytes=facts.state_total_bytes, free_bytes=min(facts.state_free_bytes, facts.state_total_bytes)
        ),
    )
    for pool in found:
        values = {
            "total_bytes": pool.total_bytes,
            "free_bytes": min(pool.free_bytes, pool.total_bytes),
            "is_available": pool.is_available,
            "seen_at": now,
        }
        held = select(func.coalesce(func.sum(StorageLayer.bytes), 0)).where(
            StorageLayer.host_id == host.id, StorageLayer.pool == pool.name
        )
        made = insert(StoragePool).values(
            id=new_id(Kind.STORAGE_POOL), host_id=host.id, name=pool.name, reserved_bytes=held.scalar_subquery(), **values
        )
        await session.execute(made.on_conflict_do_update(index_elements=[StoragePool.host_id, StoragePool.name], set_=values))
    others = StoragePool.host_id == host.id, StoragePool.name.not_in([pool.name for pool in found])
    await session.execute(update(StoragePool).where(*others).values(is_available=False))
    query = select(StoragePool).where(StoragePool.host_id == host.id).order_by(StoragePool.name)
    for row in await session.scalars(query.execution_options(populate_existing=True)):
        await _alarm(session, row, host.name)


async def _alarm(session: AsyncSession, row: StoragePool, host: str) -> None:
    if row.is_available and row.is_low:
        context = {"host_id": row.host_id, "pool": row.name, "free_bytes": row.free_bytes, "total_bytes": row.total_bytes}
        await open_incident(session, LOW, row.id, low_words(row, host), context)
    else:
        await resolve_incident(session, LOW, row.id, by="host")
    if not row.is_available and row.reserved_bytes:
        words = f"Host {host} does not see pool {row.name}, which holds volumes: mount its disk again."
        await open_incident(session, MISSING, row.id, words, {"host_id": row.host_id, "pool": row.name})
    else:
        await resolve_incident(session, MISSING, row.id, by="host")


async def take(session: AsyncSession, host_id: str, name: str, size_bytes: int) -> bool:
    """Promise that much of the host's pool; False when there is no room, or no such pool. The caller writes it down as a layer.

    A host that has said nothing of its pools yet is taken at its word: what its layers hold counts when it has (`learn`).
    """
    fits = StoragePool.is_available, size_bytes <= ROOM
    here = StoragePool.host_id == host_id, StoragePool.name == name
    change = update(StoragePool).where(*here, *fits).values(reserved_bytes=StoragePool.reserved_bytes + size_bytes)
    change = change.returning(StoragePool.id).execution_options(synchronize_session=False)
    if (await session.execute(change)).one_or_none() is not None:
        return True
    known = await session.scalar(select(func.count()).select_from(StoragePool).where(StoragePool.host_id == host_id))
    return not known and name == PRIMARY


async def hold(session: AsyncSession, host_id: str, name: str, more_bytes: int) -> None:
    """What lies on the disk is held, whether there was room for it or not; less than nothing gives back."""
    if not more_bytes:
        return
    here = StoragePool.host_id == host_id, StoragePool.name == name
    change = update(StoragePool).where(*here).values(reserved_bytes=func.greatest(StoragePool.reserved_bytes + more_bytes, 0))
    await session.execute(change.execution_options(synchronize_session=False))


async def choose(session: AsyncSession, name: str, size_bytes: int, *, architecture: str = "") -> str:
    """The ready host whose pool of that name has most room, with the room taken. Raises StoragePoolNoSpace.

    Whoever takes the room between look and taking has made progress, so looking again ends.
    """
    usable = Host.state == "ready", Host.is_cordoned.is_(False), Host.link != "lost", Host.roles.contains(["compute"])
    query = select(StoragePool.host_id).join(Host, Host.id == StoragePool.host_id).where(*usable, StoragePool.name == name)
    if architecture:
        query = query.where(Host.architecture == architecture)
    query = query.where(StoragePool.is_available, size_bytes <= ROOM).order_by(ROOM.desc(), StoragePool.id).limit(1)
    for _ in range(MOST_TRIES):
        host_id = await session.scalar(query)
        if host_id is None:
            break
        if await take(session, host_id, name, size_bytes):
            return host_id
    raise no_space(await shortage(session, name, size_bytes), name)


async def end_retained(session: AsyncSession, pool: StoragePool) -> None:
    """Their retention is over now; until their runs have seen that, they can still be restored."""
    for volume in await retained(session, pool):
        volume.purge_at = func.now()
        await kernel.start(session, "volume", volume.id, host_id=volume.host_id)
    await session.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Why no pool takes it: of `pools` with the name, `missing` are not there, the others have at most `most_free_bytes`."""

    needed_bytes: int
    pools: int
    missing: int
    most_free_bytes: int


async def shortage(session: AsyncSession, name: str, size_bytes: int, host_id: str = "") -> Shortage:
    room = func.greatest(func.max(ROOM).filter(StoragePool.is_available), 0)
    missing = func.count().filter(StoragePool.is_available.is_(False))
    query = select(func.count(), missing, room).where(StoragePool.name == name)
    row = (await session.execute(query.where(StoragePool.host_id == host_id) if host_id else query)).one()
    return Shortage(needed_bytes=size_bytes, pools=row[0], missing=row[1], most_free_bytes=int(row[2] or 0))


def no_space(short: Shortage, name: str) -> StoragePoolNoSpace:
    where = f"None of {short.pools} pools {name}" if short.pools != 1 else f"Pool {name}"
    verb = "has" if short.pools != 1 else "does not have"
    words = f"{where} {verb} {short.needed_bytes} bytes of room (most: {short.most_free_bytes}"
    return StoragePoolNoSpace(
        words + (f"; {short.missing} are not there)." if short.missing else ")."),
        pool=name,
        pools=short.pools,
        missing=short.missing,
        needed_bytes=short.needed_bytes,
        most_free_bytes=short.most_free_bytes,
    )
