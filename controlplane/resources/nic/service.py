"""Making interfaces. The one rule: the address is taken under the lock of the network's row, so nobody else gets it."""

from __future__ import annotations

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.models.network import Network
from controlplane.models.nic import Nic
from controlplane.resources.address import service as addresses
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.network import allocate
from controlplane.resources.network.errors import NetworkFull, NetworkNotFound


async def allocate_nic(
    session: AsyncSession, network_id: str, *, owner_id: str, host_id: str | None = None, position: int = 0
) -> Nic:
    """An interface of the machine `owner_id` with free addresses of the network; raises NetworkFull, NetworkNotFound."""
    network = await session.scalar(select(Network).where(Network.id == network_id).with_for_update(key_share=True))
    if network is None:
        raise NetworkNotFound(f"no network {network_id}")
    taken = await session.scalars(select(Nic.ipv4).where(Nic.network_id == network_id))
    offset = allocate.free_offset(network.ipv4_cidr, taken)
    if offset is None:
        raise NetworkFull(f"network {network.name} ({network.ipv4_cidr}) has no free address left")
    ipv4, ipv6, mac = allocate.addresses_at(network.ipv4_cidr, network.ipv6_cidr, offset)
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


async def put_on_host(session: AsyncSession, owner_id: str, host_id: str) -> None:
    """The machine runs on this host from now on; its firewalls are told there before it starts."""
    here = Nic.owner_id == owner_id, Nic.host_id.is_distinct_from(host_id)
    moved = await session.scalars(update(Nic).where(*here).values(host_id=host_id).returning(Nic.network_id))
    network_ids = sorted(set(moved))
    if network_ids:
        await firewalls.members_changed(session, network_ids, owner_id)
        await addresses.machine_changed(session, owner_id)


async def remove_nics(session: AsyncSession, owner_id: str) -> None:
    """Give the addresses of a machine back; only after the machine is gone from its host."""
    gone = await session.scalars(delete(Nic).where(Nic.owner_id == owner_id).returning(Nic.network_id))
    await firewalls.members_changed(session, sorted(set(gone)), owner_id)
    await addresses.machine_changed(session, owner_id)
