"""Changes of networks. The one rule: prefixes are chosen under the lock of the pool's row, in the request's transaction."""

from __future__ import annotations

from ipaddress import IPv4Network

from sqlalchemy import delete, exists, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.models.firewall import Firewall, FirewallAttachment, FirewallRule
from controlplane.models.network import AddressPool, Network
from controlplane.models.nic import Nic
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.network import allocate
from controlplane.resources.network.errors import (
    NetworkCidrOutsidePool,
    NetworkEncryptionUnsupported,
    NetworkFirewallUnknown,
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
    firewall_id = await _firewall_id(session, project_id, wanted.firewall)
    session.add(network)
    await session.flush()
    if firewall_id is not None:
        session.add(FirewallAttachment(firewall_id=firewall_id, network_id=network.id))
        await session.flush()
        await firewalls.wake(session, [firewall_id, *await firewalls.referring(session, [firewall_id])])
    return network


async def _firewall_id(session: AsyncSession, project_id: str, ref: str | None) -> str | None:
    if ref is None:
        return None
    if ref == firewalls.DEFAULT:
        return (await firewalls.ensure_default(session, project_id)).id
    column = Firewall.id if is_id(ref, Kind.FIREWALL) else Firewall.name
    query = select(Firewall.id).where(column == ref, Firewall.project_id == project_id, Firewall.owner_id.is_(None))
    found = await session.scalar(query.with_for_update(key_share=True, read=True))
    if found is None:
        detail = f"no firewall {ref}"
        raise NetworkFirewallUnknown(detail, errors=(FieldError(pointer="/firewall", detail=detail),))
    return found


async def remove(session: AsyncSession, network: Network) -> None:
    """Delete the row; raises NetworkInUse. The caller holds its lock, so no interface can be added meanwhile."""
    if await session.scalar(select(exists().where(Nic.network_id == network.id))):
        raise NetworkInUse(f"machines still have interfaces in {network.name}")
    naming = select(Firewall.name).join(FirewallRule, FirewallRule.firewall_id == Firewall.id)
    if named_by := sorted(set(await session.scalars(naming.where(FirewallRule.network_id == network.id)))):
        raise NetworkInUse(f"rules of {', '.join(named_by)} name {network.name}")
    guarding = select(FirewallAttachment.firewall_id).where(FirewallAttachment.network_id == network.id)
    guards = list(await session.scalars(guarding))
    await session.execute(delete(Network).where(Network.id == network.id))
    await firewalls.wake(session, [*guards, *await firewalls.referring(session, guards)])
    session.expunge(network)
