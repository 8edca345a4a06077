"""Changes of networks. The one rule: prefixes are chosen under the lock of the pool's row, in the request's transaction."""

from __future__ import annotations

from ipaddress import IPv4Network

from sqlalchemy import delete, exists, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.models.network import AddressPool, Network
from controlplane.models.nic import Nic
from controlplane.resources.network import allocate
from controlplane.resources.network.errors import (
    NetworkCidrOutsidePool,
    NetworkEncryptionUnsupported,
    NetworkInUse,
    NetworkPoolExhausted,
)
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.settings import NetworkSettings


async def locked_pool(session: AsyncSession, settings: NetworkSettings) -> AddressPool:
    """The pool with its lock; IPv4 as the settings say, the random IPv6 prefix as it was chosen at first use."""
    query = select(AddressPool).where(AddressPool.id == 1).with_for_update(key_share=True)
    found = await session.scalar(query)
    if found is None:
        values = {"id": 1, "ipv4_cidr": settings.ipv4_pool, "ipv6_cidr": allocate.ula_prefix()}
        await session.execute(insert(AddressPool).values(**values).on_conflict_do_nothing())
        found = (await session.scalars(query)).one()
    found.ipv4_cidr, found.ipv4_prefix_length = settings.ipv4_pool, settings.ipv4_prefix_length
    return found


async def create(session: AsyncSession, settings: NetworkSettings, project_id: str, wanted: NetworkCreate) -> Network:
    """Raises the errors of `controlplane.resources.network.errors`; nothing is kept then."""
    if wanted.encryption != "none":
        raise NetworkEncryptionUnsupported(errors=(FieldError(pointer="/encryption", detail="only `none` for now"),))
    of = await locked_pool(session, settings)
    taken = (await session.execute(select(Network.ipv4_cidr, Network.ipv6_cidr))).all()
    if wanted.ipv4_cidr is None:
        ipv4_cidr = allocate.free_ipv4(of.ipv4_cidr, of.ipv4_prefix_length, (row.ipv4_cidr for row in taken))
    else:
        ipv4_cidr = IPv4Network(wanted.ipv4_cidr)
        if not ipv4_cidr.subnet_of(of.ipv4_cidr):
            detail = f"{ipv4_cidr} is not inside the pool {of.ipv4_cidr}"
            raise NetworkCidrOutsidePool(detail, errors=(FieldError(pointer="/ipv4_cidr", detail=detail),))
    ipv6_cidr = allocate.free_ipv6(of.ipv6_cidr, (row.ipv6_cidr for row in taken))
    if ipv4_cidr is None or ipv6_cidr is None:
        raise NetworkPoolExhausted(f"the pool {of.ipv4_cidr}, {of.ipv6_cidr} has no free prefix left")
    network = Network(
        id=new_id(Kind.NETWORK),
        project_id=project_id,
        name=wanted.name,
        ipv4_cidr=ipv4_cidr,
        ipv6_cidr=ipv6_cidr,
        encryption=wanted.encryption,
        labels=dict(wanted.labels),
        observed_generation=1,
    )
    session.add(network)
    await session.flush()
    return network


async def remove(session: AsyncSession, network: Network) -> None:
    """Delete the row; raises NetworkInUse. The caller holds its lock, so no interface can be added meanwhile."""
    if await session.scalar(select(exists().where(Nic.network_id == network.id))):
        raise NetworkInUse(f"machines still have interfaces in {network.name}")
    await session.execute(delete(Network).where(Network.id == network.id))
    session.expunge(network)
