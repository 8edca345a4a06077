"""Reserved addresses over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.address import Address
from controlplane.resources.address import queries, service
from controlplane.resources.address.errors import (
    AddressAttached,
    AddressFamilyTaken,
    AddressInUse,
    AddressLimitReached,
    AddressNameTaken,
    AddressNotFound,
    AddressOutsidePool,
    AddressPoolExhausted,
    AddressPoolUnknown,
    AddressTaken,
    AddressTargetUnknown,
)
from controlplane.resources.address.queries import ShownAddress
from controlplane.resources.address.schemas import AddressAttach, AddressReserve, AddressUpdate, AddressView

noun = Noun("address", "addresses")
router = noun.router


@noun.create(
    AddressView,
    errors=[
        AddressNameTaken,
        AddressTaken,
        AddressOutsidePool,
        AddressPoolUnknown,
        AddressPoolExhausted,
        AddressLimitReached,
    ],
)
async def reserve(call: Call, body: AddressReserve) -> ShownAddress:
    """Reserve a public address; it stays the project's until it is released."""
    row = await service.reserve(call.session, call.services.settings.limits, call.project_id, body)
    call.subject = row
    return await queries.show(call.session, row)


@noun.list(AddressView)
async def list_(call: Call, page: Page) -> PageOf[ShownAddress]:
    """The reserved addresses of the project."""
    found = await call.page(Address, page, fields=["pool_id", "vm_id", "loadbalancer_id"])
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(AddressView, errors=[AddressNotFound])
async def show(call: Call, address: Ref) -> ShownAddress:
    """One address, and what it leads to."""
    return await queries.show(call.session, await call.load(Address, address))


@noun.update(AddressView, errors=[AddressNotFound])
async def update(call: Call, address: Ref, body: AddressUpdate) -> ShownAddress:
    """Change the fields that are sent."""
    row = await call.load(Address, address)
    if "labels" in body.model_fields_set:
        row.labels = dict(body.labels)
        await service.touched(call.session, row)
    return await queries.show(call.session, row)


@noun.action("attach", AddressView, errors=[AddressNotFound, AddressAttached, AddressFamilyTaken, AddressTargetUnknown])
async def attach(call: Call, address: Ref, body: AddressAttach) -> ShownAddress:
    """Let it lead to a VM or a load balancer; with `move` it is taken from what it leads to now."""
    row = await call.load(Address, address)
    await service.attach(call.session, row, body)
    return await queries.show(call.session, row)


@noun.action("detach", AddressView, errors=[AddressNotFound])
async def detach(call: Call, address: Ref) -> ShownAddress:
    """Let it lead nowhere; it stays reserved."""
    row = await call.load(Address, address)
    await service.detach(call.session, row)
    return await queries.show(call.session, row)


@noun.delete(AddressView, errors=[AddressInUse])
async def release(call: Call, address: Ref) -> None:
    """Give it back to its pool."""
    await service.release(call.session, await call.load(Address, address))
