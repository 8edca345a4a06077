"""Changes of the mesh. The one rule: a host's own addresses are taken under the lock of the pool's row."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import exists, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.kernel import service as kernel
from controlplane.models.host import Host
from controlplane.models.network import AddressPool, Network
from controlplane.models.tunnel import HostTunnel, TunnelRotation
from controlplane.resources.tunnel.errors import TunnelsRotating
from controlplane.resources.tunnel.queries import NETWORKED_ROLES, prefixes_of
from controlplane.settings import NetworkSettings


async def join_hosts(session: AsyncSession) -> list[str]:
    """Give every host that can encrypt its own private addresses, once there is an encrypted network: the lowest free ones.

    The ids of those that got theirs now.
    """
    if not await session.scalar(select(exists().where(Network.encryption == "wireguard"))):
        return []
    waiting = (
        select(Host.id)
        .outerjoin(HostTunnel, HostTunnel.host_id == Host.id)
        .where(HostTunnel.host_id.is_(None), Host.state == "ready", Host.roles.overlap(NETWORKED_ROLES))
        .where(Host.tunnel_driver != "", or_(Host.underlay_ipv4.is_not(None), Host.underlay_ipv6.is_not(None)))
        .order_by(Host.id)
    )
    host_ids = list(await session.scalars(waiting))
    if not host_ids:
        return []
    pool = await session.get_one(AddressPool, 1, with_for_update={"key_share": True})
    ipv4_prefix, ipv6_prefix = prefixes_of(pool)
    taken = set(await session.scalars(select(HostTunnel.ipv4)))
    foreign = [cidr for cidr in await session.scalars(select(Network.ipv4_cidr)) if cidr.overlaps(ipv4_prefix)]
    free = (address for address in ipv4_prefix.hosts() if address not in taken and not any(address in net for net in foreign))
    joined = list(zip(host_ids, free, strict=False))  # a full prefix leaves the rest out
    for host_id, ipv4 in joined:
        number = int(ipv4) - int(ipv4_prefix.network_address)
        session.add(HostTunnel(host_id=host_id, ipv4=ipv4, ipv6=ipv6_prefix.network_address + number))
    await session.flush()
    return [host_id for host_id, _ in joined]


async def rotate(session: AsyncSession, now: datetime) -> TunnelRotation:
    """Begin: every host makes a second interface with a new key. Raises TunnelsRotating."""
    row = await _locked_rotation(session)
    if row.is_rotating:
        raise TunnelsRotating(f"generation {row.key_generation + 1} is on its way")
    row.is_rotating, row.started_at = True, now
    await session.flush()
    await kernel.start(session, "routes", "all")
    return row


async def rotate_when_due(session: AsyncSession, settings: NetworkSettings, now: datetime) -> None:
    """By itself, counted from the last rotation's end or the first key."""
    if not settings.rotate_keys_days or not await session.scalar(select(exists(select(HostTunnel.host_id)))):
        return
    row = await _locked_rotation(session)
    since = row.finished_at or row.created_at
    if not row.is_rotating and now - since > timedelta(days=settings.rotate_keys_days):
        row.is_rotating, row.started_at = True, now
        await session.flush()


async def _locked_rotation(session: AsyncSession) -> TunnelRotation:
    await session.execute(insert(TunnelRotation).values(id=1).on_conflict_do_nothing())
    return await session.get_one(TunnelRotation, 1, with_for_update=True, populate_existing=True)
