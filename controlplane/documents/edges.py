"""Which edge hosts carry a load balancer. The one rule: highest random weight, so that a host's coming or going moves only
what it gains or loses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.loadbalancer import Loadbalancer


def rank(loadbalancer_id: str, host_id: str) -> bytes:
    return hashlib.sha256(f"{loadbalancer_id} {host_id}".encode()).digest()


async def edges_of(session: AsyncSession, loadbalancer: Loadbalancer) -> Sequence[str]:
    """At most as many as wanted of the hosts with role `edge` that are up and not drained, best first."""
    query = select(Host.id).where(
        Host.state == "ready", Host.is_cordoned.is_(False), Host.link != "lost", Host.roles.contains(["edge"])
    )
    hosts = sorted(await session.scalars(query), key=lambda host_id: rank(loadbalancer.id, host_id), reverse=True)
    return hosts[: loadbalancer.edges]
