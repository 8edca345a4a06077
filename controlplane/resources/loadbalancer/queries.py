"""Reading load balancers with all that the API shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.documents.queries import Behind, Said, applied, behind_on, holders_of
from controlplane.models.address import Address
from controlplane.models.endpoint import Endpoint
from controlplane.models.host import Host
from controlplane.models.loadbalancer import Loadbalancer, LoadbalancerBackend, LoadbalancerListener
from controlplane.models.nic import Nic
from controlplane.models.vm import Vm
from controlplane.resources.loadbalancer.document import listeners_of, machines_of, vips_of
from controlplane.resources.loadbalancer.traffic import summed

WORST = ("up", "leaving", "draining", "ejected", "circuit_open", "down")
_GETS_FLOWS = ("up", "starting", "held", "circuit half open")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    host: str
    state: str
    since: datetime | None


def word_of(said: str) -> str:
    """One word for what an edge says; a backend that gets flows in one address family is up."""
    families = (said, *(part for family in ("IPv4: ", "IPv6: ") for part in said.split(family)[1:]))
    if any(part.startswith(_GETS_FLOWS) for part in families):
        return "up"
    return next((word for word in WORST if said.startswith(word.replace("_", " "))), "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    nic: Nic
    seen: Sequence[Seen]
    traffic: Mapping[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.nic, name)

    @property
    def nic_id(self) -> str:
        return self.nic.id

    @property
    def state(self) -> str:
        """The worst that any edge says: that edge sends nothing to it."""
        if not self.seen:
            return "unknown"
        return max((word_of(one.state) for one in self.seen), key=WORST.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBackend:
    row: LoadbalancerBackend
    kind: str
    target: str
    machines: Sequence[Machine]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def wanted(self) -> str:
        if self.row.ejected_until is not None:
            return "ejected"
        return "draining" if self.row.is_draining else "active"


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    host: str
    client_address: str
    detail: Mapping[str, Json]


@dataclass(slots=True, kw_only=True)
class ShownLoadbalancer:
    """A load balancer; other attributes are the row's, read when the answer is written."""

    row: Loadbalancer
    vips: Sequence[str] = ()
    listeners: Sequence[LoadbalancerListener] = ()
    backends: list[ShownBackend] = field(default_factory=list)
    carried_by: Sequence[Edge] = ()
    behind: Sequence[Behind] = ()
    unheld: Mapping[str, str] = field(default_factory=dict)
    """Of its addresses those that no host holds, and why if a host said so."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def machines(self) -> list[Machine]:
        return [machine for backend in self.backends for machine in backend.machines]

    @property
    def status(self) -> str:
        if self.row.state == "deleting":
            return "deleting"
        if not self.carried_by:
            return "starting"
        up = sum(machine.state == "up" for machine in self.machines)
        if not up:
            return "down" if any(machine.seen for machine in self.machines) or not self.machines else "starting"
        if len(self.unheld) == len(self.vips):
            return "down"
        return "up" if up == len(self.machines) and not self.unheld else "degraded"

    @property
    def conditions(self) -> list[Said]:
        said = [applied(self.row.observed_generation >= self.row.generation, self.behind)]
        if not self.carried_by and not self.behind:
            words = "No host with role edge is ready; it is carried as soon as one is."
            said.append(Said(type="Carried", status="false", reason="loadbalancer.no_edge", message=words))
        if not self.vips:
            words = "It has no address: attach a reserved one."
            said.append(Said(type="Addressed", status="false", reason="loadbalancer.no_address", message=words))
        if self.unheld:
            words = "; ".join(f"{vip}: {why or 'no host holds it'}" for vip, why in self.unheld.items())
            said.append(Said(type="Addressed", status="false", reason="loadbalancer.address_not_held", message=words))
        well = [machine for machine in self.machines if machine.state == "up"]
        if well:
            said.append(Said(type="Ready", status="true"))
        else:
            words = "No backend is up: new flows are refused at once." if self.machines else "It has no backends."
            said.append(Said(type="Ready", status="false", reason="loadbalancer.no_backend_up", message=words))
        return said


async def shown(session: AsyncSession, rows: Iterable[Loadbalancer]) -> list[ShownLoadbalancer]:
    found = {row.id: ShownLoadbalancer(row=row) for row in rows}
    ids = list(found)
    names = {row[0]: row[1] for row in await session.execute(select(Host.id, Host.name))} if found else {}
    held, behind = await holders_of(session, "loadbalancer", ids), await behind_on(session, "loadbalancer", ids)
    for one in found.values():
        one.vips = await vips_of(session, one.row.id)
        one.listeners = await listeners_of(session, one.row.id)
        one.backends = await _backends(session, one.row, names)
        one.carried_by = _edges(one.row, names, held.get(one.row.id, ()))
        one.behind = behind.get(one.row.id, ())
        one.unheld = await _unheld(session, one.row.id)
    return list(found.values())


async def show(session: AsyncSession, row: Loadbalancer) -> ShownLoadbalancer:
    (one,) = await shown(session, [row])
    return one


async def _unheld(session: AsyncSession, loadbalancer_id: str) -> dict[str, str]:
    rows = await session.execute(select(Address.id, Address.address).where(Address.loadbalancer_id == loadbalancer_id))
    public = {row[0]: str(row[1]) for row in rows}
    held, behind = await holders_of(session, "address", list(public)), await behind_on(session, "address", list(public))
    found = {
        text: next((f"{one.host}: {one.detail}" for one in behind.get(address_id, ()) if one.code), "")
        for address_id, text in public.items()
        if address_id not in held
    }
    private = await session.execute(select(Nic.ipv4, Nic.ipv6).where(Nic.owner_id == loadbalancer_id, Nic.host_id.is_(None)))
    return found | {str(one): "" for row in private for one in row}


def _edges(row: Loadbalancer, names: Mapping[str, str], held: Sequence[str]) -> list[Edge]:
    said = {names.get(host_id, host_id): value for host_id, value in row.observed.items() if isinstance(value, dict)}
    edges: list[Edge] = []
    for host in held:
        detail = said.get(host, {}).get("detail")
        known = detail if isinstance(detail, dict) else {}
        edges.append(Edge(host=host, client_address=str(known.get("client_address", "unknown")), detail=known))
    return edges


async def _backends(session: AsyncSession, row: Loadbalancer, names: Mapping[str, str]) -> list[ShownBackend]:
    query = (
        select(LoadbalancerBackend, Vm.name, Endpoint.name)
        .outerjoin(Nic, Nic.id == LoadbalancerBackend.nic_id)
        .outerjoin(Vm, Vm.id == Nic.owner_id)
        .outerjoin(Endpoint, Endpoint.id == LoadbalancerBackend.endpoint_id)
        .where(LoadbalancerBackend.loadbalancer_id == row.id)
        .order_by(LoadbalancerBackend.id)
    )
    machines: dict[str, list[Machine]] = {}
    for backend, nic in await machines_of(session, row.id):
        machines.setdefault(backend.id, []).append(
            Machine(nic=nic, seen=_seen(row, nic.id, names), traffic=_traffic(row, nic.id))
        )
    return [
        ShownBackend(
            row=backend,
            kind="vm" if backend.nic_id is not None else "endpoint",
            target=vm or endpoint or "",
            machines=machines.get(backend.id, ()),
        )
        for backend, vm, endpoint in await session.execute(query)
    ]


def _traffic(row: Loadbalancer, nic_id: str) -> Mapping[str, Any] | None:
    said = [value.get("traffic") for value in row.observed.values() if isinstance(value, dict)]
    return summed(one.get(nic_id) for one in said if isinstance(one, dict))


def _seen(row: Loadbalancer, nic_id: str, names: Mapping[str, str]) -> list[Seen]:
    found: list[Seen] = []
    for host_id, value in row.observed.items():
        backends = value.get("backends") if isinstance(value, dict) else None
        state = backends.get(nic_id) if isinstance(backends, dict) else None
        if isinstance(state, list):
            since = datetime.fromisoformat(str(state[1]))
            found.append(Seen(host=names.get(host_id, host_id), state=str(state[0]), since=since))
    return found
