"""Has each reserved address held where it must be: by the host of its machine, or by edge hosts of its load balancer.

The one rule: where only one host may announce an address, the next one is told after the last one has let go, or is lost and
its lease is over. Another edge stands by meanwhile: it is told so when the holder has the address, never before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, cast

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.documents.edges import edges_of
from controlplane.documents.queries import holding
from controlplane.kernel import service as kernel
from controlplane.kernel.outcome import Outcome, step, wait
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.world import World
from controlplane.models.address import Address, Pool
from controlplane.models.holder_lease import HolderLease
from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.nic import Nic
from controlplane.remote.link import HostLinks
from hostagent.protocol.network import AddressWanted

KIND = "address"
NOTICES = "notices"
LEASE_LOOK_SECONDS = 0.5


class AddressReconciler(Reconciler[Address, HostLinks]):
    """One run an address."""

    name: ClassVar[str] = KIND
    _is_held_back = False

    @step(within=None)
    async def look(self) -> Outcome:
        await self.reconcile()
        return wait(seconds=LEASE_LOOK_SECONDS) if self._is_held_back else wait(self.every)

    @classmethod
    async def subjects(cls, world: World[Any]) -> Iterable[str]:
        async with world.database.session() as session:
            return list(await session.scalars(select(Address.id)))

    async def reconcile(self) -> None:
        async with self.tx() as tx:
            address, self._is_held_back = await plan(tx.session, self.subject_id)
            if address is not None and not self._is_held_back and await documents.is_carried_out(tx.session, KIND, address.id):
                address.observed_generation = address.generation


async def plan(session: AsyncSession, address_id: str) -> tuple[Address | None, bool]:
    """Make the documents of all hosts equal to the row. The row, locked (None: it was released), and whether its next
    holder waits for the last one.
    """
    query = select(Address).where(Address.id == address_id).with_for_update(key_share=True)
    address = await session.scalar(query.execution_options(populate_existing=True))
    if address is None:
        await documents.withdraw(session, KIND, address_id, is_final=True)
        return None, False
    pool = await session.get_one(Pool, address.pool_id)
    edges = await _edges(session, address)
    hosts, private_address = await _holders(session, address, pool, edges)
    standby = await _standby(session, address.id, hosts, edges) if pool.announce == "arp" else ()
    is_other = await documents.withdraw(session, KIND, address.id, keep=[*hosts, *standby])
    if hosts and pool.announce != "bgp" and await _is_still_held(session, address.id, hosts):
        return address, True
    wanted = AddressWanted(
        id=address.id,
        generation=documents.UNPLANNED,
        address=str(address.address),
        private_address=private_address,
        announce=cast("Literal['none', 'arp', 'bgp']", pool.announce),
    )
    for host_id in hosts:
        await documents.plan(session, host_id, KIND, wanted)
        if pool.announce == "arp":  # there before the first renewal, so that who takes the address away can lock it
            await session.execute(insert(HolderLease).values(host_id=host_id).on_conflict_do_nothing())
    for host_id in standby:
        is_other |= await documents.plan(session, host_id, KIND, replace(wanted, standby_for=hosts[0]))
    if is_other:
        await kernel.start(session, NOTICES, "all")
    return address, False


async def _edges(session: AsyncSession, address: Address) -> Sequence[str]:
    """The edge hosts of the load balancer that it leads to, best first."""
    if address.loadbalancer_id is None:
        return ()
    return await edges_of(session, await session.get_one(Loadbalancer, address.loadbalancer_id))


async def _standby(session: AsyncSession, address_id: str, hosts: Sequence[str], edges: Sequence[str]) -> Sequence[str]:
    """The next best edge, once the holder has the address."""
    if not edges or not hosts:
        return ()
    here = HostDocument.kind == KIND, HostDocument.object_id == address_id, HostDocument.host_id == hosts[0]
    query = select(HostDocument.host_id).where(*here, HostDocument.is_wanted, holding())
    holds = await session.scalar(query.where(HostDocument.applied_generation == HostDocument.generation))
    return [edge for edge in edges if edge != hosts[0]][:1] if holds is not None else ()


async def _holders(session: AsyncSession, address: Address, pool: Pool, edges: Sequence[str]) -> tuple[Sequence[str], str]:
    """The hosts that shall hold it, and the machine's own address there ("" for a load balancer)."""
    if address.vm_id is not None:
        query = select(Nic).where(Nic.owner_id == address.vm_id).order_by(Nic.position).limit(1)
        nic = await session.scalar(query)
        if nic is None or nic.host_id is None:
            return (), ""
        return (nic.host_id,), str(nic.ipv4 if address.address.version == 4 else nic.ipv6)
    if pool.announce == "bgp":
        return edges, ""
    if address.holder_id not in edges:
        address.holder_id = edges[0] if edges else None
    return [holder for holder in (address.holder_id,) if holder is not None], ""


async def _is_still_held(session: AsyncSession, address_id: str, but: Sequence[str]) -> bool:
    """Whether another host may still count on holding it: it answers and has not let go, or its lease is not over.

    One that only stood by is not waited for: if it has taken the address, it lets go of it when it hears the new holder.
    """
    held = (
        select(HostDocument.host_id, Host.link)
        .join(Host, Host.id == HostDocument.host_id)
        .where(HostDocument.kind == KIND, HostDocument.object_id == address_id, HostDocument.host_id.not_in(list(but)))
        .where(
            holding(),
            HostDocument.is_wanted.is_(False),
            HostDocument.applied_generation.between(1, HostDocument.generation - 1),
        )
    )
    links = {row[0]: row[1] for row in await session.execute(held)}
    if any(link != "lost" for link in links.values()):
        return True
    leases = select(HolderLease.lease_until > func.clock_timestamp()).where(HolderLease.host_id.in_(list(links)))
    return any(await session.scalars(leases.order_by(HolderLease.host_id).with_for_update()))
