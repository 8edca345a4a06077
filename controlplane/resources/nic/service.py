"""Making interfaces. The one rule: the address is taken under the lock of the network's row, so nobody else gets it; one that
was given back rests first.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import delete, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import CIDR, insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.models.network import Network
from controlplane.models.nic import Nic, RestingAddress
from controlplane.resources.address import service as addresses
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.network import allocate
from controlplane.resources.network.errors import NetworkFull, NetworkNotFound

REST = timedelta(seconds=60)
"""How long an address is given to nobody else when there are others: longer than gateways, balancers and hosts need to hear."""


async def allocate_nic(
    session: AsyncSession, network_id: str, *, owner_id: str, host_id: str | None = None, position: int = 0
) -> Nic:
    """An interface of the machine `owner_id` with free addresses of the network; raises NetworkFull, NetworkNotFound."""
    network = await session.scalar(select(Network).where(Network.id == network_id).with_for_update(key_share=True))
    if network is None:
        raise NetworkNotFound(f"no network {network_id}")
    taken = await session.scalars(select(Nic.ipv4).where(Nic.network_id == network_id))
    offset = allocate.free_offset(network.ipv4_cidr, taken, await _resting(session, network))
    if offset is None:
        raise NetworkFull(f"network {network.name} ({network.ipv4_cidr}) has no free address left")
    ipv4, ipv6, mac = allocate.addresses_at(network.ipv4_cidr, network.ipv6_cidr, offset)
    await session.execute(delete(RestingAddress).where(RestingAddress.address.in_([ipv4, ipv6])))
    nic = Nic(
        id=new_id(Kind.NIC),
        project_id=network.project_id,
        network_id=network_id,
        owner_id=owner_id,
        position=position,
        host_id=host_id,
        mac=mac,
        ipv4=ipv4,
        ipv6=ipv6,
        mtu_bytes=network.mtu_bytes,
    )
    session.add(nic)
    await session.flush()
    await firewalls.members_changed(session, [network_id], owner_id)
    return nic


async def _resting(session: AsyncSession, network: Network) -> list[int]:
    """Host numbers of the network that rest, who rests longest first; forgets what rested long enough."""
    address = RestingAddress.address
    here = or_(*(address.op("<<=")(literal(cidr, CIDR)) for cidr in (network.ipv4_cidr, network.ipv6_cidr)))
    await session.execute(delete(RestingAddress).where(here, RestingAddress.since < func.now() - REST))
    found = await session.scalars(select(address).where(here).order_by(RestingAddress.since))
    starts = {4: int(network.ipv4_cidr.network_address), 6: int(network.ipv6_cidr.network_address)}
    return list(dict.fromkeys(int(one) - starts[one.version] for one in found))


async def put_on_host(session: AsyncSession, owner_id: str, host_id: str) -> None:
    """The machine runs on this host from now on; its firewalls are told there before it starts."""
    here = Nic.owner_id == owner_id, Nic.host_id.is_distinct_from(host_id)
    moved = await session.scalars(update(Nic).where(*here).values(host_id=host_id).returning(Nic.network_id))
    network_ids = sorted(set(moved))
    if network_ids:
        await firewalls.members_changed(session, network_ids, owner_id)
        await addresses.machine_changed(session, owner_id)


async def remove_nics(session: AsyncSession, owner_id: str) -> None:
    """Give the addresses of a machine back, to rest; only after the machine is gone from its host."""
    query = delete(Nic).where(Nic.owner_id == owner_id).returning(Nic.network_id, Nic.ipv4, Nic.ipv6)
    gone = (await session.execute(query)).all()
    if gone:
        rows = [{"address": address} for nic in gone for address in (nic.ipv4, nic.ipv6)]
        await session.execute(insert(RestingAddress).values(rows).on_conflict_do_nothing())
    await firewalls.members_changed(session, sorted({nic.network_id for nic in gone}), owner_id)
    await addresses.machine_changed(session, owner_id)
