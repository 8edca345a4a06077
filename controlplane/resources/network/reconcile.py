"""Routes between hosts: compute hosts and gateways send the addresses of VMs on other hosts to those hosts' data addresses.

The one rule: a host's document is made anew from the rows; only a changed one gets a new generation. `routes` plans for
the fleet, `host_routes` carries out, one run a host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address
from typing import Any, ClassVar

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import json
from controlplane.kernel import epoch
from controlplane.kernel import service as kernel
from controlplane.kernel.reconcile import ALL, Reconciler
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.network import HostRoutes
from controlplane.models.nic import Nic
from controlplane.remote.link import HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out
from hostagent.protocol.wanted import Generation, NetworkWanted, RouteWanted

ROUTES = "routes"
ROUTED_ROLES = ["compute", "gateway"]
Addressed = tuple[str, IPv4Address, IPv6Address, IPv4Address | None, IPv6Address | None]


def routes_of(host_id: str, nics: Sequence[Addressed]) -> tuple[RouteWanted, ...]:
    """The routes of one host, sorted; addresses of machines on hosts without a data address of that family are left out."""
    found: list[RouteWanted] = []
    for on_host, ipv4, ipv6, data_ipv4, data_ipv6 in nics:
        if on_host == host_id:
            continue
        if data_ipv4 is not None:
            found.append(RouteWanted(destination_cidr=f"{ipv4}/32", via=str(data_ipv4)))
        if data_ipv6 is not None:
            found.append(RouteWanted(destination_cidr=f"{ipv6}/128", via=str(data_ipv6)))
    return tuple(sorted(found, key=lambda route: (route.destination_cidr, route.via)))


def digest_of(routes: Sequence[RouteWanted]) -> str:
    return hashlib.sha256(json.dumps([[route.destination_cidr, route.via] for route in routes])).hexdigest()


async def placed_nics(session: AsyncSession) -> Sequence[Addressed]:
    """Every interface on a host, with that host's data addresses."""
    query = select(Nic.host_id, Nic.ipv4, Nic.ipv6, Host.data_ipv4, Host.data_ipv6).join(Host, Host.id == Nic.host_id)
    return [(row[0] or "", row[1], row[2], row[3], row[4]) for row in await session.execute(query)]


class RoutesReconciler(Reconciler[str, HostLinks]):
    """Plans: gives every host with machines or a gateway whose routes changed a new generation, and wakes its run."""

    name: ClassVar[str] = "routes"

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            hosts = await tx.session.scalars(select(Host.id).where(Host.state == "ready", Host.roles.overlap(ROUTED_ROLES)))
            nics = await placed_nics(tx.session)
            for host_id in sorted(hosts):
                if await _plan(tx.session, host_id, digest_of(routes_of(host_id, nics))):
                    await kernel.start(tx.session, "host_routes", host_id, host_id=host_id)


async def _plan(session: AsyncSession, host_id: str, digest: str) -> bool:
    """Write the digest down; True when it is another than before."""
    changed = (
        insert(HostRoutes)
        .values(host_id=host_id, digest=digest)
        .on_conflict_do_update(
            index_elements=[HostRoutes.host_id],
            set_={"digest": digest, "generation": HostRoutes.generation + 1},
            where=HostRoutes.digest != digest,
        )
        .returning(HostRoutes.host_id)
    )
    return await session.scalar(changed) is not None


class HostRoutesReconciler(Reconciler[HostRoutes, HostLinks]):
    """Says the whole document to one host, which compares it with what it sees; an unreachable host gets it when it is back."""

    name: ClassVar[str] = "host_routes"

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(HostRoutes.host_id)))

    async def reconcile(self) -> None:
        if not self.has_subject:
            return
        document = await self._document()
        if document is None:
            return
        try:
            result = await self.world.hosts.ensure(self.subject_id, document)
        except (HostUnreachable, HostKeyChanged):
            return
        if carried_out(result) is None:
            raise TimeoutError("the host is still at its routes")
        async with self.tx() as tx:
            await tx.session.execute(
                update(HostRoutes)
                .where(HostRoutes.host_id == self.subject_id, HostRoutes.generation >= document.generation.number)
                .values(applied_generation=document.generation.number, applied_at=func.now())
            )

    async def _document(self) -> NetworkWanted | None:
        """None: the rows moved on since the plan; it is made anew, which wakes us again."""
        async with self.tx() as tx:
            row = await tx.session.get_one(HostRoutes, self.subject_id)
            routes = routes_of(row.host_id, await placed_nics(tx.session))
            if digest_of(routes) != row.digest:
                await kernel.start(tx.session, "routes", ALL)
                return None
            generation = Generation(epoch=await epoch.current(tx.session), number=row.generation)
        return NetworkWanted(id=ROUTES, generation=generation, routes=routes)
