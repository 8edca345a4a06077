"""Which hosts tell each other at once of ended machines: each edge, and each host with backends that it balances; and who
says to whom that it is there: the holder of an address to the edge that stands by.

The one rule: it follows from the documents as they are planned, and a host hears only of what concerns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.documents.queries import holding
from controlplane.kernel.reconcile import Reconciler
from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from controlplane.remote.link import HostLinks
from controlplane.resources.loadbalancer.document import KIND, NOTICES
from controlplane.resources.loadbalancer.ways import plan_ways
from hostagent.protocol.network import NoticePeerWanted, NoticesWanted

ADDRESS = "address"


@dataclass(slots=True)
class Pair:
    """What one host says to (`sends`) and believes of (`accepts`) another, by the ids of interfaces."""

    sends: set[str] = field(default_factory=set)
    accepts: set[str] = field(default_factory=set)


class NoticesReconciler(Reconciler[str, HostLinks]):
    """Plans the notices of every host, and the ways between edges and hosts of backends."""

    name: ClassVar[str] = NOTICES

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            settings = self.world.settings.network
            balanced = await _balanced(tx.session)
            await plan_notices(tx.session, settings.notices_port, balanced)
            await plan_ways(tx.session, settings, balanced)


Balanced = list[tuple[str, Mapping[str, Any]]]


async def _balanced(session: AsyncSession) -> Balanced:
    """The load balancers' documents as they are planned, by edge."""
    query = select(HostDocument.host_id, HostDocument.document).where(HostDocument.kind == KIND, HostDocument.is_wanted)
    return [(row[0], row[1]) for row in await session.execute(query.order_by(HostDocument.host_id, HostDocument.object_id))]


async def plan_notices(session: AsyncSession, port: int, balanced: Balanced) -> None:
    pairs = pairs_of(balanced)
    here = HostDocument.kind == ADDRESS, HostDocument.is_wanted, holding(is_standby=True)
    for one, other in await session.execute(
        select(HostDocument.host_id, HostDocument.document["standby_for"].astext).where(*here)
    ):
        pairs.setdefault(one, {}).setdefault(other, Pair())
        pairs.setdefault(other, {}).setdefault(one, Pair())
    hosts = {host.id: host for host in await session.scalars(select(Host).where(Host.id.in_(list(pairs))))}
    told = [host_id for host_id in sorted(pairs) if host_id in hosts and address_of(hosts[host_id])]
    for host_id in told:
        peers = {peer: pair for peer, pair in pairs[host_id].items() if peer in told}
        await documents.plan(session, host_id, NOTICES, notices(hosts, host_id, peers, port))
    await documents.withdraw(session, NOTICES, NOTICES, keep=told)


def pairs_of(balanced: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, dict[str, Pair]]:
    """By host and peer, from the documents of edges. A backend on the edge itself needs no word."""
    found: dict[str, dict[str, Pair]] = {}
    for edge, document in balanced:
        for backend in document["backends"]:
            there, nic_id = backend["host_id"], backend["nic_id"]
            if there and nic_id and there != edge:
                found.setdefault(edge, {}).setdefault(there, Pair()).accepts.add(nic_id)
                found.setdefault(there, {}).setdefault(edge, Pair()).sends.add(nic_id)
    return found


def notices(hosts: Mapping[str, Host], host_id: str, peers: Mapping[str, Pair], port: int) -> NoticesWanted:
    """Without keys: they are derived when it is said, so that none lies in the database."""
    return NoticesWanted(
        id=NOTICES,
        generation=documents.UNPLANNED,
        host_id=host_id,
        listen_address=address_of(hosts[host_id]),
        listen_port=port,
        peers=tuple(
            NoticePeerWanted(
                host_id=peer,
                address=address_of(hosts[peer]),
                port=port,
                key="",
                sends=tuple(sorted(pair.sends)),
                accepts=tuple(sorted(pair.accepts)),
            )
            for peer, pair in sorted(peers.items())
        ),
    )


def address_of(host: Host) -> str:
    """Its address on the data network; "" when none is known."""
    return str(host.data_ipv4 or host.data_ipv6 or "")
