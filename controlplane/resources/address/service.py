"""Changes of reserved addresses. The one rule: a free address is chosen under the lock of its pool's row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from sqlalchemy import delete, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.documents import service as documents
from controlplane.kernel import service as kernel
from controlplane.models.address import Address, Pool
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.project import Project
from controlplane.models.vm import Vm
from controlplane.resources.address.errors import (
    AddressAttached,
    AddressFamilyTaken,
    AddressInUse,
    AddressLimitReached,
    AddressOutsidePool,
    AddressPoolExhausted,
    AddressPoolUnknown,
    AddressTaken,
    AddressTargetUnknown,
)
from controlplane.resources.address.queries import target_name
from controlplane.resources.address.schemas import AddressAttach, AddressReserve
from controlplane.settings import LimitSettings

PROGRAM = "address"
LOADBALANCER = "loadbalancer"
AnyAddress = IPv4Address | IPv6Address


async def reserve(session: AsyncSession, limits: LimitSettings, project_id: str, wanted: AddressReserve) -> Address:
    """Raises the errors of this noun; nothing is kept then."""
    await session.scalar(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
    have = await session.scalar(select(func.count()).select_from(Address).where(Address.project_id == project_id)) or 0
    if have >= limits.addresses:
        raise AddressLimitReached(f"the project has {have} addresses, and may have {limits.addresses}", limit=limits.addresses)
    pools = await _pools(session, wanted)
    pool, address = await _chosen(session, pools, wanted)
    row = Address(
        id=new_id(Kind.ADDRESS),
        project_id=project_id,
        name=wanted.name,
        labels=dict(wanted.labels),
        pool_id=pool.id,
        address=address,
        observed_generation=1,
    )
    session.add(row)
    await session.flush()
    return row


async def attach(session: AsyncSession, address: Address, wanted: AddressAttach) -> None:
    """Raises AddressAttached, AddressTargetUnknown, AddressFamilyTaken."""
    vm_id, loadbalancer_id = await _target(session, address.project_id, wanted)
    before = address.vm_id, address.loadbalancer_id
    if before == (vm_id, loadbalancer_id):
        return
    if before != (None, None) and not wanted.move:
        where = await target_name(session, address)
        raise AddressAttached(f"{address.name} is attached to {where}; with `move` it is taken from there")
    if vm_id is not None:
        same = Address.vm_id == vm_id, func.family(Address.address) == address.address.version
        if await session.scalar(select(Address.id).where(*same, Address.id != address.id)):
            raise AddressFamilyTaken(f"{wanted.vm} has a reserved {address.family} address already")
    await _tell_loadbalancers(session, (address.loadbalancer_id, loadbalancer_id))
    address.vm_id, address.loadbalancer_id, address.holder_id = vm_id, loadbalancer_id, None
    await _changed(session, address)


async def detach(session: AsyncSession, address: Address) -> None:
    """Not attached is success."""
    if address.vm_id is None and address.loadbalancer_id is None:
        return
    await _tell_loadbalancers(session, (address.loadbalancer_id,))
    address.vm_id = address.loadbalancer_id = address.holder_id = None
    await _changed(session, address)


async def release(session: AsyncSession, address: Address) -> None:
    """Give it back to its pool; raises AddressInUse."""
    if address.vm_id is not None or address.loadbalancer_id is not None:
        raise AddressInUse(f"{address.name} is attached to {await target_name(session, address)}: detach it first")
    await documents.withdraw(session, PROGRAM, address.id, is_final=True)
    await kernel.destroy(session, PROGRAM, address.id)
    await session.execute(delete(Address).where(Address.id == address.id).execution_options(synchronize_session=False))
    session.expunge(address)


async def machine_changed(session: AsyncSession, vm_id: str) -> None:
    """The machine has another host, or is gone."""
    for address_id in await session.scalars(select(Address.id).where(Address.vm_id == vm_id).order_by(Address.id)):
        await kernel.start(session, PROGRAM, address_id)


async def touched(session: AsyncSession, address: Address) -> None:
    """A change that hosts need not hear of."""
    await _changed(session, address)


async def _changed(session: AsyncSession, address: Address) -> None:
    address.generation += 1
    await session.flush()
    await kernel.start(session, PROGRAM, address.id)


async def _tell_loadbalancers(session: AsyncSession, ids: Iterable[str | None]) -> None:
    for loadbalancer_id in sorted({one for one in ids if one is not None}):
        await kernel.start(session, LOADBALANCER, loadbalancer_id)


async def _target(session: AsyncSession, project_id: str, wanted: AddressAttach) -> tuple[str | None, str | None]:
    if wanted.vm is not None:
        column = Vm.id if is_id(wanted.vm, Kind.VM) else Vm.name
        here = Vm.project_id == project_id, Vm.owner_id.is_(None), Vm.state != "deleting"
        found = await session.scalar(select(Vm.id).where(column == wanted.vm, *here))
    else:
        column = Loadbalancer.id if is_id(wanted.loadbalancer or "", Kind.LOADBALANCER) else Loadbalancer.name
        here = Loadbalancer.project_id == project_id, Loadbalancer.state == "active"
        found = await session.scalar(select(Loadbalancer.id).where(column == wanted.loadbalancer, *here))
    if found is None:
        field, ref = ("vm", wanted.vm) if wanted.vm is not None else ("loadbalancer", wanted.loadbalancer)
        raise AddressTargetUnknown(f"no {field} {ref}", errors=(FieldError(pointer=f"/{field}", detail=f"no {field} {ref}"),))
    return (found, None) if wanted.vm is not None else (None, found)


async def _pools(session: AsyncSession, wanted: AddressReserve) -> Sequence[Pool]:
    """The pools that may serve it, locked, in the order of their ids."""
    query = select(Pool).order_by(Pool.id).with_for_update(key_share=True)
    if wanted.pool is not None:
        query = query.where(or_(Pool.id == wanted.pool, Pool.name == wanted.pool))
    family = wanted.family or (f"ipv{ip_address(wanted.address).version}" if wanted.address else None)
    if family is None and wanted.pool is None:
        family = "ipv4"
    if family is not None:
        query = query.where(func.family(Pool.cidr) == int(family[-1]))
    pools = list(await session.scalars(query))
    if not pools:
        detail = f"no pool {wanted.pool}" if wanted.pool else f"the operator has made no pool of {family} addresses"
        pointer = "/pool" if wanted.pool else "/family"
        raise AddressPoolUnknown(detail, errors=(FieldError(pointer=pointer, detail=detail),))
    return pools


async def _chosen(session: AsyncSession, pools: Sequence[Pool], wanted: AddressReserve) -> tuple[Pool, AnyAddress]:
    if wanted.address is not None:
        address = ip_address(wanted.address)
        pool = next((pool for pool in pools if is_given(pool, address)), None)
        if pool is None:
            detail = f"{address} is in none of the pools {', '.join(str(pool.cidr) for pool in pools)}, or excluded"
            raise AddressOutsidePool(detail, errors=(FieldError(pointer="/address", detail=detail),))
        if await session.scalar(select(Address.id).where(Address.address == address)):
            raise AddressTaken(f"{address} is reserved already")
        return pool, address
    for pool in pools:
        taken = set(await session.scalars(select(Address.address).where(Address.pool_id == pool.id)))
        address = lowest_free(pool, taken)
        if address is not None:
            return pool, address
    raise AddressPoolExhausted(f"no free address is left in {', '.join(pool.name for pool in pools)}")


def is_given(pool: Pool, address: AnyAddress) -> bool:
    """Whether the pool gives this address away at all: not a subnet's own, not its broadcast, not what is excluded."""
    if address.version != pool.cidr.version or address not in pool.cidr:
        return False
    if pool.cidr.prefixlen < pool.cidr.max_prefixlen - 1 and address in {pool.cidr[0], pool.cidr[-1]}:
        return False
    return not any(address in ip_network(text) for text in pool.excluded)


def lowest_free(pool: Pool, taken: Iterable[AnyAddress]) -> AnyAddress | None:
    """Skips whole exclusions, so that a large one costs nothing."""
    blocked = sorted((int(net[0]), int(net[-1])) for net in map(ip_network, pool.excluded))
    used = {int(address) for address in taken}
    is_subnet = pool.cidr.prefixlen < pool.cidr.max_prefixlen - 1
    at, last = int(pool.cidr[0]) + is_subnet, int(pool.cidr[-1]) - is_subnet
    while at <= last:
        over = next((end for start, end in blocked if start <= at <= end), None)
        if over is None and at not in used:
            return ip_address(at) if pool.cidr.version == 4 else IPv6Address(at)
        at = at + 1 if over is None else over + 1
    return None
