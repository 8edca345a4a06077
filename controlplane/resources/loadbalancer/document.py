"""From rows to what edge hosts are told. The one rule: every edge is told the same but for which backends see the client's
address there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, cast

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.documents.edges import edges_of
from controlplane.kernel import service as kernel
from controlplane.models.address import Address
from controlplane.models.firewall import FirewallRule
from controlplane.models.loadbalancer import Loadbalancer, LoadbalancerBackend, LoadbalancerListener
from controlplane.models.nic import Nic
from controlplane.models.replica import Replica
from controlplane.models.vm import Vm
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.loadbalancer.profile import PROFILES
from controlplane.resources.loadbalancer.service import backends_of
from controlplane.resources.loadbalancer.ways import kept_on
from hostagent.protocol.network import BackendWanted, CircuitWanted, ListenerWanted, LoadBalancerWanted, ProbeWanted

KIND = "loadbalancer"
NOTICES = "notices"
State = Literal["active", "draining", "ejected", "removed"]


async def plan(session: AsyncSession, row: Loadbalancer, now: datetime) -> list[str]:
    """Make the documents of all hosts, the private address's holder and the backends' firewall equal to the rows.

    Returns the edge hosts. The caller holds the row's lock.
    """
    edges = list(await edges_of(session, row))
    await _hold_private(session, row, edges)
    await _end_ejections(session, row.id, now)
    listeners = await listeners_of(session, row.id)
    machines = await machines_of(session, row.id)
    await _open_ports(session, row, listeners, machines)
    wanted = document(row, await vips_of(session, row.id), listeners, machines)
    changed: list[bool] = []
    for host_id in edges:
        by_way = await kept_on(session, host_id, KIND, row.id)
        changed.append(await documents.plan(session, host_id, KIND, for_edge(wanted, host_id, by_way)))
    is_other = await documents.withdraw(session, KIND, row.id, keep=edges) or any(changed)
    if is_other:
        await kernel.start(session, NOTICES, "all")
    for address_id in await session.scalars(select(Address.id).where(Address.loadbalancer_id == row.id)):
        await _look_when_moved(session, address_id, edges, is_other=is_other)
    return edges


async def _look_when_moved(session: AsyncSession, address_id: str, edges: Sequence[str], *, is_other: bool) -> None:
    """Its holder must be one of the edges, and another one stands by."""
    address = await session.get_one(Address, address_id)
    if is_other or ((address.holder_id not in edges) if edges else address.holder_id is not None):
        await kernel.start(session, "address", address_id)


def document(
    row: Loadbalancer,
    vips: Sequence[str],
    listeners: Sequence[LoadbalancerListener],
    machines: Sequence[tuple[LoadbalancerBackend, Nic]],
) -> LoadBalancerWanted:
    """What all edges have in common."""
    profile = PROFILES[row.profile]
    is_going = row.state == "deleting"
    backends = [backend_of(backend, nic, is_going=is_going) for backend, nic in machines]
    here = {backend.id for backend in backends}
    departed = [_departed(one) for one in row.departed if isinstance(one, dict) and one.get("id") not in here]
    return LoadBalancerWanted(
        id=row.id,
        generation=documents.UNPLANNED,
        vips=tuple(vips),
        listeners=tuple(
            ListenerWanted(protocol=cast("Literal['tcp', 'udp']", one.protocol), port=one.port, target_port=one.target_port)
            for one in listeners
        ),
        backends=tuple(sorted((*backends, *departed), key=lambda one: one.id)),
        algorithm=cast("Literal['hash', 'round_robin', 'random']", row.algorithm),
        hash_on=cast("Literal['source', 'source_port']", row.hash_on),
        probe=ProbeWanted(**cast("dict[str, Any]", row.probe)) if row.probe is not None else None,
        circuit=CircuitWanted(**cast("dict[str, Any]", row.circuit)) if row.circuit is not None else None,
        established_timeout_seconds=profile.established_timeout_seconds,
        udp_timeout_seconds=profile.udp_timeout_seconds,
        new_connections_per_second_per_source=row.new_connections_per_second_per_source,
        connections_per_source=row.connections_per_source,
        drain_seconds=row.drain_seconds,
        slow_start_seconds=row.slow_start_seconds,
    )


def backend_of(backend: LoadbalancerBackend, nic: Nic, *, is_going: bool) -> BackendWanted:
    state: State = "active"
    if is_going or backend.is_draining:
        state = "draining"
    if backend.ejected_until is not None:
        state = "ejected"
    return BackendWanted(
        id=nic.id,
        ipv4=str(nic.ipv4),
        ipv6=str(nic.ipv6),
        weight=backend.weight,
        state=state,
        nic_id=nic.id,
        host_id=nic.host_id or "",
    )


def _departed(one: dict[str, Any]) -> BackendWanted:
    return BackendWanted(id=str(one["id"]), weight=int(one["weight"]), state="removed")


def for_edge(wanted: LoadBalancerWanted, host_id: str, by_way: Collection[str] = ()) -> LoadBalancerWanted:
    """Backends on the edge itself answer through it anyway, and those at these addresses by a way: they see the client."""

    def reply(backend: BackendWanted) -> Literal["direct", "way", "masqueraded"]:
        if backend.state == "removed" or backend.host_id == host_id:
            return "direct"
        return "way" if backend.ipv4 in by_way else "masqueraded"

    backends = tuple(replace(backend, reply=reply(backend)) for backend in wanted.backends)
    is_kept = all(backend.state == "removed" for backend in backends) or any(
        backend.reply != "masqueraded" for backend in backends if backend.state != "removed"
    )
    return replace(wanted, backends=backends, client_address="kept" if is_kept else "masqueraded")


async def vips_of(session: AsyncSession, loadbalancer_id: str) -> list[str]:
    """Reserved addresses, then the private ones."""
    public = await session.scalars(select(Address.address).where(Address.loadbalancer_id == loadbalancer_id))
    private = await session.execute(select(Nic.ipv4, Nic.ipv6).where(Nic.owner_id == loadbalancer_id))
    return [*sorted(str(one) for one in public), *(str(one) for row in private for one in row)]


async def listeners_of(session: AsyncSession, loadbalancer_id: str) -> Sequence[LoadbalancerListener]:
    query = select(LoadbalancerListener).where(LoadbalancerListener.loadbalancer_id == loadbalancer_id)
    return list(await session.scalars(query.order_by(LoadbalancerListener.protocol, LoadbalancerListener.port)))


async def machines_of(session: AsyncSession, loadbalancer_id: str) -> Sequence[tuple[LoadbalancerBackend, Nic]]:
    """Every machine that is on a host, with the backend it stands for; an endpoint's are its ready replicas."""
    found: dict[str, tuple[LoadbalancerBackend, Nic]] = {}
    for backend in await backends_of(session, loadbalancer_id):
        query = select(Nic).join(Vm, Vm.id == Nic.owner_id).where(Nic.host_id.is_not(None), Vm.state != "deleting")
        if backend.nic_id is not None:
            query = query.where(Nic.id == backend.nic_id)
        else:
            ready = select(Replica.vm_id).where(Replica.endpoint_id == backend.endpoint_id, Replica.state == "ready")
            query = query.where(Nic.owner_id.in_(ready), Nic.position == 0)
        for nic in await session.scalars(query.order_by(Nic.id)):
            found.setdefault(nic.id, (backend, nic))
    return list(found.values())


async def _hold_private(session: AsyncSession, row: Loadbalancer, edges: Sequence[str]) -> None:
    """The private address lies on one edge, and stays there as long as it can; hosts' routes follow it."""
    nic = await session.scalar(select(Nic).where(Nic.owner_id == row.id))
    if nic is None or nic.host_id in edges or (not edges and nic.host_id is None):
        return
    await session.execute(update(Nic).where(Nic.id == nic.id).values(host_id=edges[0] if edges else None))
    await kernel.start(session, "routes", "all")


async def _end_ejections(session: AsyncSession, loadbalancer_id: str, now: datetime) -> None:
    over = LoadbalancerBackend.loadbalancer_id == loadbalancer_id, LoadbalancerBackend.ejected_until <= now
    await session.execute(update(LoadbalancerBackend).where(*over).values(ejected_until=None, ejected_reason=""))


async def _open_ports(
    session: AsyncSession,
    row: Loadbalancer,
    listeners: Sequence[LoadbalancerListener],
    machines: Sequence[tuple[LoadbalancerBackend, Nic]],
) -> None:
    """Edges reach the backends' ports: masqueraded flows and probes come from their own addresses."""
    ports = {(one.protocol, one.target_port) for one in listeners}
    probe = row.probe or {}
    if isinstance(port := probe.get("port"), int) and port:
        ports.add(("tcp", port))
    ports |= {("tcp", port) for protocol, port in ports if protocol == "udp" and row.probe is not None}
    rules = [
        FirewallRule(direction="ingress", action="allow", protocol=protocol, port_first=port, port_last=port, far_end="edges")
        for protocol, port in sorted(ports)
    ]
    owners = {nic.owner_id for _, nic in machines}
    vm_ids = list(await session.scalars(select(Vm.id).where(Vm.id.in_(owners))))
    await firewalls.keep_owned(session, owner_id=row.id, project_id=row.project_id, name=row.name, rules=rules, vm_ids=vm_ids)
