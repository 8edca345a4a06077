"""Changes of load balancers. The one rule: what a load balancer holds (names, addresses, ports) it holds by rows made in the
request's own transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel
from sqlalchemy import delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.kernel import service as kernel
from controlplane.models.address import Address
from controlplane.models.endpoint import Endpoint
from controlplane.models.loadbalancer import Loadbalancer, LoadbalancerBackend, LoadbalancerListener
from controlplane.models.network import Network
from controlplane.models.nic import Nic
from controlplane.models.project import Project
from controlplane.models.vm import Vm
from controlplane.resources.address.queries import target_name
from controlplane.resources.loadbalancer.errors import (
    LoadbalancerAddressInUse,
    LoadbalancerAddressUnknown,
    LoadbalancerBackendNotFound,
    LoadbalancerBackendTaken,
    LoadbalancerBackendUnknown,
    LoadbalancerDeleting,
    LoadbalancerLimitReached,
    LoadbalancerListenerTaken,
    LoadbalancerNetworkUnknown,
    LoadbalancerNoAddress,
    LoadbalancerTooManyBackends,
)
from controlplane.resources.loadbalancer.schemas import (
    MAX_BACKENDS,
    Alerts,
    BackendInput,
    Eject,
    Listener,
    LoadbalancerCreate,
    LoadbalancerSettings,
    LoadbalancerUpdate,
)
from controlplane.resources.nic.service import allocate_nic
from controlplane.settings import LimitSettings

PROGRAM = "loadbalancer"
EJECT_SECONDS = 300
_SETTINGS = tuple(LoadbalancerSettings.model_fields)


async def create(session: AsyncSession, limits: LimitSettings, project_id: str, wanted: LoadbalancerCreate) -> Loadbalancer:
    """Raises the errors of this noun, and NetworkFull; nothing is kept then."""
    await session.scalar(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    here = Loadbalancer.project_id == project_id
    have = await session.scalar(select(func.count()).select_from(Loadbalancer).where(here)) or 0
    if have >= limits.loadbalancers:
        words = f"the project has {have} load balancers, and may have {limits.loadbalancers}"
        raise LoadbalancerLimitReached(words, limit=limits.loadbalancers)
    if not wanted.addresses and wanted.network is None:
        detail = "name a reserved address, or a network to have a private one in"
        raise LoadbalancerNoAddress(detail, errors=(FieldError(pointer="/addresses", detail=detail),))
    network_id = await _network_id(session, project_id, wanted.network) if wanted.network is not None else None
    row = Loadbalancer(id=new_id(Kind.LOADBALANCER), project_id=project_id, name=wanted.name, network_id=network_id)
    _settle(row, {name: getattr(wanted, name) for name in _SETTINGS})
    session.add(row)
    await session.flush()
    await _put_listeners(session, row, wanted.listeners)
    if network_id is not None:
        await allocate_nic(session, network_id, owner_id=row.id)
    for place, ref in enumerate(wanted.addresses):
        await _take_address(session, row, ref, f"/addresses/{place}")
    seen: set[tuple[str | None, str | None]] = set()
    for place, backend in enumerate(wanted.backends):
        made = await _backend(session, row, backend, f"/backends/{place}")
        if (made.nic_id, made.endpoint_id) in seen:
            detail = "it is named twice"
            raise LoadbalancerBackendTaken(detail, errors=(FieldError(pointer=f"/backends/{place}", detail=detail),))
        seen.add((made.nic_id, made.endpoint_id))
        session.add(made)
    await session.flush()
    await kernel.start(session, PROGRAM, row.id)
    return row


async def update(session: AsyncSession, row: Loadbalancer, changes: LoadbalancerUpdate) -> None:
    sent = changes.model_fields_set
    _settle(row, {name: getattr(changes, name) for name in _SETTINGS if name in sent})
    if "listeners" in sent:
        mine = delete(LoadbalancerListener).where(LoadbalancerListener.loadbalancer_id == row.id)
        await session.execute(mine.execution_options(synchronize_session=False))
        await _put_listeners(session, row, changes.listeners)
    await _changed(session, row)


async def add_backend(session: AsyncSession, row: Loadbalancer, wanted: BackendInput) -> None:
    """Raises LoadbalancerBackendUnknown, LoadbalancerBackendTaken, LoadbalancerTooManyBackends."""
    known = await backends_of(session, row.id)
    made = await _backend(session, row, wanted, "")
    if any((one.nic_id, one.endpoint_id) == (made.nic_id, made.endpoint_id) for one in known):
        raise LoadbalancerBackendTaken(f"{wanted.vm or wanted.endpoint or wanted.address} is a backend of {row.name} already")
    if len(known) >= MAX_BACKENDS:
        raise LoadbalancerTooManyBackends(f"{row.name} has {len(known)} backends")
    session.add(made)
    row.departed = []
    await _changed(session, row)


async def weigh_backend(session: AsyncSession, row: Loadbalancer, ref: str, weight: int) -> None:
    """Its share of new flows; open ones stay where they are."""
    backend = await find_backend(session, row, ref)
    if backend.weight != weight:
        backend.weight = weight
        await _changed(session, row)


async def remove_backend(session: AsyncSession, row: Loadbalancer, ref: str) -> None:
    """At once: its open flows end. Drain it first to let them."""
    backend = await find_backend(session, row, ref)
    if backend.nic_id is not None:
        row.departed = [*row.departed, {"id": backend.nic_id, "weight": backend.weight}][-MAX_BACKENDS:]
    await session.delete(backend)
    await _changed(session, row)


async def drain(session: AsyncSession, row: Loadbalancer, ref: str) -> None:
    """No new flows; the open ones have `drain_seconds`."""
    backend = await find_backend(session, row, ref)
    if not backend.is_draining:
        backend.is_draining, backend.draining_at = True, func.now()
        await _changed(session, row)


async def activate(session: AsyncSession, row: Loadbalancer, ref: str) -> None:
    """Undo draining and ejection."""
    backend = await find_backend(session, row, ref)
    backend.is_draining, backend.draining_at = False, None
    backend.ejected_until, backend.ejected_reason = None, ""
    await _changed(session, row)


async def eject(session: AsyncSession, row: Loadbalancer, ref: str, wanted: Eject, now: datetime) -> None:
    """Out for a while, open flows included; `resolved` brings it back."""
    backend = await find_backend(session, row, ref)
    if wanted.status == "resolved":
        backend.ejected_until, backend.ejected_reason = None, ""
    else:
        backend.ejected_until = now + timedelta(seconds=wanted.seconds or EJECT_SECONDS)
        backend.ejected_reason = wanted.words
    await _changed(session, row)


async def eject_by_alerts(session: AsyncSession, row: Loadbalancer, wanted: Alerts, now: datetime) -> None:
    """Backends of others are not ours to judge: they are left out. Raises LoadbalancerBackendNotFound when none is ours."""
    asked = wanted.by_backend()
    ours = {ref: eject_ for ref, eject_ in asked.items() if await _find_backend(session, row, ref) is not None}
    if not ours:
        raise LoadbalancerBackendNotFound(f"no alert has a label `backend` that names one of {row.name}")
    for ref, one in ours.items():
        await eject(session, row, ref, one, now)


async def remove(session: AsyncSession, row: Loadbalancer) -> None:
    """Begin to delete: no new flows, open ones have `drain_seconds`. Doing it twice is once."""
    if row.state == "deleting":
        return
    await kernel.start(session, PROGRAM, row.id)
    await kernel.destroy(session, PROGRAM, row.id)
    row.state, row.deleting_at = "deleting", func.now()


async def endpoint_changed(session: AsyncSession, endpoint_id: str) -> None:
    """A replica came or went."""
    query = select(LoadbalancerBackend.loadbalancer_id).where(LoadbalancerBackend.endpoint_id == endpoint_id).distinct()
    await _wake(session, list(await session.scalars(query)))


async def machine_changed(session: AsyncSession, vm_id: str) -> None:
    """A machine has another host, or is about to go: then it is no backend any more."""
    nics = select(Nic.id).where(Nic.owner_id == vm_id)
    query = select(LoadbalancerBackend.loadbalancer_id).where(LoadbalancerBackend.nic_id.in_(nics)).distinct()
    await _wake(session, list(await session.scalars(query)))


async def _wake(session: AsyncSession, ids: Sequence[str]) -> None:
    for one in sorted(set(ids)):
        await kernel.start(session, PROGRAM, one)


# -- parts ------------------------------------------------------------------------------------------------------------


def check_active(row: Loadbalancer) -> None:
    """Raises LoadbalancerDeleting."""
    if row.state == "deleting":
        raise LoadbalancerDeleting(f"{row.name} is being deleted")


async def backends_of(session: AsyncSession, loadbalancer_id: str) -> Sequence[LoadbalancerBackend]:
    here = LoadbalancerBackend.loadbalancer_id == loadbalancer_id
    return list(await session.scalars(select(LoadbalancerBackend).where(here).order_by(LoadbalancerBackend.id)))


async def find_backend(session: AsyncSession, row: Loadbalancer, ref: str) -> LoadbalancerBackend:
    """By its id, or the id or name of its VM or endpoint; raises LoadbalancerBackendNotFound."""
    found = await _find_backend(session, row, ref)
    if found is None:
        raise LoadbalancerBackendNotFound(f"{row.name} has no backend {ref}")
    return found


async def _find_backend(session: AsyncSession, row: Loadbalancer, ref: str) -> LoadbalancerBackend | None:
    query = (
        select(LoadbalancerBackend)
        .outerjoin(Nic, Nic.id == LoadbalancerBackend.nic_id)
        .outerjoin(Vm, Vm.id == Nic.owner_id)
        .outerjoin(Endpoint, Endpoint.id == LoadbalancerBackend.endpoint_id)
        .where(LoadbalancerBackend.loadbalancer_id == row.id)
        .where(or_(*(column == ref for column in (LoadbalancerBackend.id, Vm.id, Vm.name, Endpoint.id, Endpoint.name, Nic.id))))
        .order_by(LoadbalancerBackend.id)
    )
    return (await session.scalars(query)).first()


async def _changed(session: AsyncSession, row: Loadbalancer) -> None:
    row.generation += 1
    await session.flush()
    await kernel.start(session, PROGRAM, row.id)


def _settle(row: Loadbalancer, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(row, name, value.model_dump() if isinstance(value, BaseModel) else value)


async def _put_listeners(session: AsyncSession, row: Loadbalancer, wanted: Sequence[Listener]) -> None:
    seen: dict[tuple[str, int], int] = {}
    for place, one in enumerate(wanted):
        if (before := seen.setdefault((one.protocol, one.port), place)) != place:
            detail = f"{one.protocol} port {one.port} is listener {before} already"
            raise LoadbalancerListenerTaken(detail, errors=(FieldError(pointer=f"/listeners/{place}/port", detail=detail),))
        session.add(
            LoadbalancerListener(
                loadbalancer_id=row.id, protocol=one.protocol, port=one.port, target_port=one.target_port or one.port
            )
        )
    await session.flush()


async def _network_id(session: AsyncSession, project_id: str, ref: str) -> str:
    column = Network.id if is_id(ref, Kind.NETWORK) else Network.name
    found = await session.scalar(select(Network.id).where(column == ref, Network.project_id == project_id))
    if found is None:
        detail = f"no network {ref}"
        raise LoadbalancerNetworkUnknown(detail, errors=(FieldError(pointer="/network", detail=detail),))
    return found


async def _take_address(session: AsyncSession, row: Loadbalancer, ref: str, pointer: str) -> None:
    column = Address.id if is_id(ref, Kind.ADDRESS) else Address.name
    query = select(Address).where(column == ref, Address.project_id == row.project_id).with_for_update(key_share=True)
    address = await session.scalar(query)
    if address is None:
        raise LoadbalancerAddressUnknown(f"no address {ref}", errors=(FieldError(pointer=pointer, detail=f"no address {ref}"),))
    if address.vm_id is not None or address.loadbalancer_id is not None:
        detail = f"{address.name} is attached to {await target_name(session, address)}"
        raise LoadbalancerAddressInUse(detail, errors=(FieldError(pointer=pointer, detail=detail),))
    address.loadbalancer_id = row.id
    address.generation += 1
    await session.flush()
    await kernel.start(session, "address", address.id)


async def _backend(session: AsyncSession, row: Loadbalancer, wanted: BackendInput, pointer: str) -> LoadbalancerBackend:
    made = LoadbalancerBackend(id=new_id(Kind.BACKEND), loadbalancer_id=row.id, weight=wanted.weight)
    if wanted.endpoint is not None:
        field, ref = "endpoint", wanted.endpoint
        column = Endpoint.id if is_id(ref, Kind.ENDPOINT) else Endpoint.name
        here = Endpoint.project_id == row.project_id, Endpoint.state == "active"
        made.endpoint_id = await session.scalar(select(Endpoint.id).where(column == ref, *here))
    elif wanted.vm is not None:
        field, ref = "vm", wanted.vm
        column = Vm.id if is_id(ref, Kind.VM) else Vm.name
        here = Vm.project_id == row.project_id, Vm.owner_id.is_(None), Vm.state != "deleting"
        query = select(Nic.id).join(Vm, Vm.id == Nic.owner_id).where(column == ref, *here)
        made.nic_id = await session.scalar(query.order_by(Nic.position).limit(1))
    else:
        field, ref = "address", wanted.address or ""
        same = or_(func.host(Nic.ipv4) == ref, func.host(Nic.ipv6) == ref)
        query = select(Nic.id).join(Vm, Vm.id == Nic.owner_id).where(same, Nic.project_id == row.project_id)
        made.nic_id = await session.scalar(query.where(Vm.owner_id.is_(None)))
    if made.nic_id is None and made.endpoint_id is None:
        detail = f"no {field} {ref} in the project"
        raise LoadbalancerBackendUnknown(detail, errors=(FieldError(pointer=f"{pointer}/{field}", detail=detail),))
    return made
