"""Reading interfaces."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.nic import Nic
from hostagent.protocol.wanted import Generation, NicWanted


async def nics_of(session: AsyncSession, owner_ids: Iterable[str]) -> dict[str, list[Nic]]:
    """The interfaces of each machine, in their order."""
    query = select(Nic).where(Nic.owner_id.in_(list(owner_ids))).order_by(Nic.owner_id, Nic.position)
    found: dict[str, list[Nic]] = {}
    for nic in await session.scalars(query):
        found.setdefault(nic.owner_id, []).append(nic)
    return found


def wanted_nic(nic: Nic, generation: Generation) -> NicWanted:
    """The interface as its host is told of it."""
    return NicWanted(
        id=nic.id, generation=generation, mac=nic.mac, ipv4=str(nic.ipv4), ipv6=str(nic.ipv6), mtu_bytes=nic.mtu_bytes
    )
