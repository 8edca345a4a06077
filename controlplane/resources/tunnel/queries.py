"""Reading the mesh of tunnels."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.network import AddressPool, HostRoutes
from controlplane.models.tunnel import HostTunnel, TunnelRotation

NETWORKED_ROLES = ["compute", "gateway", "edge"]


async def find_rotation(session: AsyncSession) -> TunnelRotation | None:
    """None: nobody has a key yet, so generation 1 is the first."""
    return await session.get(TunnelRotation, 1)


async def named_hosts(session: AsyncSession) -> list[tuple[HostTunnel, str]]:
    """Every host in the mesh with its name, by name."""
    query = select(HostTunnel, Host.name).join(Host, Host.id == HostTunnel.host_id).order_by(Host.name)
    return [(row, name) for row, name in await session.execute(query)]


async def untold_hosts(session: AsyncSession, host_ids: list[str]) -> list[str]:
    """Those that have not taken their newest tunnels or routes."""
    tunnels = select(HostTunnel.host_id).where(HostTunnel.applied_generation < HostTunnel.generation)
    routes = select(HostRoutes.host_id).where(HostRoutes.applied_generation < HostRoutes.generation)
    found = {*await session.scalars(tunnels), *await session.scalars(routes)}
    return sorted(found & set(host_ids))


async def host_prefixes(session: AsyncSession) -> tuple[IPv4Network, IPv6Network] | None:
    """Where the hosts' own private addresses come from: machines never reach them. None before the first network."""
    pool = await session.get(AddressPool, 1)
    return prefixes_of(pool) if pool is not None else None


def prefixes_of(pool: AddressPool) -> tuple[IPv4Network, IPv6Network]:
    """The last /20 of the IPv4 pool (of a small one its last quarter) and the last /64 of the IPv6 one."""
    length = min(max(20, pool.ipv4_cidr.prefixlen + 2), 32)
    last = int(pool.ipv4_cidr.broadcast_address) & ~((1 << (32 - length)) - 1)
    ipv6_last = int(pool.ipv6_cidr.broadcast_address) & ~((1 << 64) - 1)
    return IPv4Network((last, length)), IPv6Network((ipv6_last, 64))
