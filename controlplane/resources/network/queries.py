"""Reading what the hosts' network documents are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.network import Network
from controlplane.models.nic import Nic
from controlplane.models.tunnel import HostTunnel
from controlplane.resources.network import mesh
from controlplane.resources.network.mesh import OVERHEAD_BYTES, Member, Mesh, Rotation
from controlplane.resources.tunnel.queries import NETWORKED_ROLES, find_rotation
from controlplane.settings import NetworkSettings

DEFAULT_MTU_BYTES = 1500
_SERVING_ROLES = frozenset({"edge", "gateway"})
_LEAST_HOSTS_APART = 2


async def load_mesh(session: AsyncSession, settings: NetworkSettings) -> Mesh:
    """Every host that is there, with its machines. Hosts not in the mesh have no `own` addresses."""
    row = await find_rotation(session)
    rotation = Rotation(key_generation=row.key_generation, is_rotating=row.is_rotating) if row else Rotation()
    tunnels = {row.host_id: row for row in await session.scalars(select(HostTunnel))}
    machines = await _machines(session)
    hosts = await session.scalars(select(Host).where(Host.state == "ready", Host.roles.overlap(NETWORKED_ROLES)))
    found = [_member(host, tunnels.get(host.id), machines.get(host.id, Machines()), rotation) for host in hosts]
    pairs = await session.execute(select(Network.ipv4_cidr, Network.ipv6_cidr).where(Network.encryption == "wireguard"))
    smallest = await smallest_mtu(session, within=tunnels)
    return Mesh(
        members=mesh.members_of(found),
        rotation=rotation,
        prefixes=tuple(sorted(str(cidr) for pair in pairs for cidr in pair)),
        port=settings.tunnel_port,
        mtu_bytes=smallest - OVERHEAD_BYTES,
    )


async def is_encrypted(session: AsyncSession, network_id: str) -> bool:
    return await session.scalar(select(Network.encryption).where(Network.id == network_id)) == "wireguard"


async def smallest_mtu(session: AsyncSession, *, within: Iterable[str] | None = None) -> int:
    """Of the ways between hosts: a packet of this size passes between any two of them."""
    query = select(func.min(Host.underlay_mtu_bytes)).where(Host.state == "ready")
    if within is not None:
        query = query.where(Host.id.in_(list(within)))
    return await session.scalar(query) or DEFAULT_MTU_BYTES


async def without_tunnels(session: AsyncSession) -> list[str]:
    """Names of ready compute hosts where WireGuard cannot run; empty while one can, or there is no host."""
    hosts = (await session.scalars(_compute_hosts())).all()
    return [] if any(host.tunnel_driver for host in hosts) else sorted(host.name for host in hosts)


async def without_trusted_data(session: AsyncSession) -> list[str]:
    """Names of ready compute hosts for which no trusted data interface was declared, where there are several hosts."""
    hosts = (await session.scalars(_compute_hosts())).all()
    return sorted(host.name for host in hosts if not host.data_interface) if len(hosts) >= _LEAST_HOSTS_APART else []


def _compute_hosts() -> Select[Host]:
    return select(Host).where(Host.state == "ready", Host.roles.contains(["compute"]))


@dataclass(slots=True)
class Machines:
    """Of one host, by their network's encryption: prefixes, and the projects they belong to."""

    prefixes: dict[str, list[str]] = field(default_factory=dict)
    projects: dict[str, set[str]] = field(default_factory=dict)


async def _machines(session: AsyncSession) -> dict[str, Machines]:
    """By host."""
    query = (
        select(Nic.host_id, Nic.ipv4, Nic.ipv6, Network.encryption, Network.project_id)
        .join(Network, Network.id == Nic.network_id)
        .where(Nic.host_id.is_not(None))
        .order_by(Nic.ipv4)
    )
    found: dict[str, Machines] = {}
    for host_id, ipv4, ipv6, encryption, project_id in await session.execute(query):
        machines = found.setdefault(host_id or "", Machines())
        machines.prefixes.setdefault(encryption, []).extend((f"{ipv4}/32", f"{ipv6}/128"))
        machines.projects.setdefault(encryption, set()).add(project_id)
    return found


def _member(host: Host, tunnel: HostTunnel | None, machines: Machines, rotation: Rotation) -> Member:
    learned = {tunnel.key_generation_a: tunnel.public_key_a, tunnel.key_generation_b: tunnel.public_key_b} if tunnel else {}
    return Member(
        host_id=host.id,
        data=(_text(host.data_ipv4), _text(host.data_ipv6)),
        underlay=(_text(host.underlay_ipv4), _text(host.underlay_ipv6)),
        own=(str(tunnel.ipv4), str(tunnel.ipv6)) if tunnel else (),
        keys={n: key for n, key in learned.items() if n in rotation.generations},
        heard={"a": frozenset(tunnel.heard_a), "b": frozenset(tunnel.heard_b)} if tunnel else {},
        encrypted=tuple(machines.prefixes.get("wireguard", ())),
        plain=tuple(machines.prefixes.get("none", ())),
        projects=frozenset().union(*machines.projects.values()),
        encrypted_projects=frozenset(machines.projects.get("wireguard", ())),
        serves_all=not _SERVING_ROLES.isdisjoint(host.roles),
    )


def _text(address: IPv4Address | IPv6Address | None) -> str:
    return str(address) if address is not None else ""
