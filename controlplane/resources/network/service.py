"""Changes of networks. The one rule: prefixes are chosen under the lock of the pool's row, in the request's transaction."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

from sqlalchemy import delete, exists, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import BedplateError, FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.kernel import service as kernel
from controlplane.models.firewall import Firewall, FirewallAttachment, FirewallRule
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.network import AddressPool, Network
from controlplane.models.nic import Nic
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.network import allocate
from controlplane.resources.network.errors import (
    NetworkCidrOutsidePool,
    NetworkCidrTaken,
    NetworkDataUntrusted,
    NetworkEncryptionUnsupported,
    NetworkFirewallUnknown,
    NetworkInUse,
    NetworkPoolExhausted,
)
from controlplane.resources.network.mesh import OVERHEAD_BYTES
from controlplane.resources.network.queries import (
    DEFAULT_MTU_BYTES,
    smallest_mtu,
    without_trusted_data,
    without_tunnels,
)
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.resources.tunnel.queries import prefixes_of
from controlplane.settings import NetworkSettings

LEAST_MTU_BYTES, MOST_MTU_BYTES = 1280, 9216


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
    encryption = wanted.encryption or settings.encryption
    await _check_encryption(session, encryption)
    ipv4_cidr, ipv6_cidr = await _prefixes(session, await locked_pool(session, settings), wanted.ipv4_cidr)
    network = Network(
        id=new_id(Kind.NETWORK),
        project_id=project_id,
        name=wanted.name,
        ipv4_cidr=ipv4_cidr,
        ipv6_cidr=ipv6_cidr,
        encryption=encryption,
        mtu_bytes=await _mtu_bytes(session, encryption),
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
    if encryption == "wireguard":
        await kernel.start(session, "routes", "all")  # the hosts have their tunnels before the first machine comes
    return network


async def _prefixes(session: AsyncSession, of: AddressPool, wanted: str | None) -> tuple[IPv4Network, IPv6Network]:
    """Free ones, or the IPv4 one that is wanted. The caller holds the pool's lock."""
    reserved = prefixes_of(of)
    ipv4_taken = [reserved[0], *await session.scalars(select(Network.ipv4_cidr))]
    ipv6_taken = [reserved[1], *await session.scalars(select(Network.ipv6_cidr))]
    if wanted is None:
        ipv4_cidr = allocate.free_ipv4(of.ipv4_cidr, of.ipv4_prefix_length, ipv4_taken)
    else:
        ipv4_cidr = IPv4Network(wanted)
        if not ipv4_cidr.subnet_of(of.ipv4_cidr):
            detail = f"{ipv4_cidr} is not inside the pool {of.ipv4_cidr}"
            raise NetworkCidrOutsidePool(detail, errors=(FieldError(pointer="/ipv4_cidr", detail=detail),))
        if ipv4_cidr.overlaps(reserved[0]):
            raise NetworkCidrTaken(f"{reserved[0]} is for the hosts' own addresses")
    ipv6_cidr = allocate.free_ipv6(of.ipv6_cidr, ipv6_taken)
    if ipv4_cidr is None or ipv6_cidr is None:
        raise NetworkPoolExhausted(f"the pool {of.ipv4_cidr}, {of.ipv6_cidr} has no free prefix left")
    return ipv4_cidr, ipv6_cidr


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


async def _check_encryption(session: AsyncSession, encryption: str) -> None:
    if encryption == "wireguard" and (names := await without_tunnels(session)):
        raise _on_encryption(NetworkEncryptionUnsupported, f"{', '.join(names[:5])}: no WireGuard, and no wireguard-go")
    if encryption == "none" and (names := await without_trusted_data(session)):
        raise _on_encryption(NetworkDataUntrusted, f"{', '.join(names[:5])}: no data interface was declared")


def _on_encryption(kind: type[BedplateError], detail: str) -> BedplateError:
    return kind(detail, errors=(FieldError(pointer="/encryption", detail=detail),))


async def _mtu_bytes(session: AsyncSession, encryption: str) -> int:
    smallest = await smallest_mtu(session)
    room = smallest - OVERHEAD_BYTES if encryption == "wireguard" else min(smallest, DEFAULT_MTU_BYTES)
    return min(max(room, LEAST_MTU_BYTES), MOST_MTU_BYTES)


async def remove(session: AsyncSession, network: Network) -> None:
    """Delete the row; raises NetworkInUse. The caller holds its lock, so no interface can be added meanwhile."""
    balancing = select(Loadbalancer.name).where(Loadbalancer.network_id == network.id).order_by(Loadbalancer.name)
    if names := list(await session.scalars(balancing)):
        raise NetworkInUse(f"load balancers serve in {network.name}: {', '.join(names[:5])}")
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
