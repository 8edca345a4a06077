"""Changes of pools."""

from __future__ import annotations

from sqlalchemy import delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.models.address import Address, Pool
from controlplane.models.network import AddressPool, Network
from controlplane.resources.pool.errors import PoolCidrTaken, PoolExclusionOutside, PoolInUse
from controlplane.resources.pool.schemas import PoolCreate, PoolUpdate, is_inside, parse_prefix


async def create(session: AsyncSession, wanted: PoolCreate) -> Pool:
    """Raises PoolCidrTaken."""
    cidr = parse_prefix(wanted.cidr)
    private = [row for rows in await session.execute(select(AddressPool.ipv4_cidr, AddressPool.ipv6_cidr)) for row in rows]
    networks = [row for rows in await session.execute(select(Network.ipv4_cidr, Network.ipv6_cidr)) for row in rows]
    for other in (*private, *networks):
        if other.version == cidr.version and other.overlaps(cidr):
            detail = f"{cidr} overlaps the private prefix {other}"
            raise PoolCidrTaken(detail, errors=(FieldError(pointer="/cidr", detail=detail),))
    pool = Pool(
        id=new_id(Kind.POOL),
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
        cidr=cidr,
        excluded=list(wanted.excluded),
        announce=wanted.announce,
        observed_generation=1,
    )
    session.add(pool)
    await session.flush()
    return pool


def update(pool: Pool, changes: PoolUpdate) -> None:
    """Raises PoolExclusionOutside."""
    for place, text in enumerate(changes.excluded):
        if not is_inside(parse_prefix(text), pool.cidr):
            detail = f"{text} is not inside {pool.cidr}"
            raise PoolExclusionOutside(detail, errors=(FieldError(pointer=f"/excluded/{place}", detail=detail),))
    for name, value in changes.model_dump(exclude_unset=True).items():
        setattr(pool, name, value)


async def remove(session: AsyncSession, pool: Pool) -> None:
    """Raises PoolInUse. The caller holds the row's lock, so nothing is reserved meanwhile."""
    if await session.scalar(select(exists().where(Address.pool_id == pool.id))):
        raise PoolInUse(f"addresses of {pool.name} are reserved")
    await session.execute(delete(Pool).where(Pool.id == pool.id))
    session.expunge(pool)
