"""VMs over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, WebSocket
from starlette.responses import StreamingResponse

from controlplane.api.errors import StreamRefused, StreamUnavailable
from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.api.standing import cut_when_lost, standing_of
from controlplane.api.stream import chunks, empty_ticket, open_stream, relay_socket, ticket_for
from controlplane.models.vm import Vm
from controlplane.resources.image.errors import ImageNotAvailable
from controlplane.resources.network.errors import NetworkFull
from controlplane.resources.quota.errors import QuotaExceeded
from controlplane.resources.vm import queries, service
from controlplane.resources.vm.errors import (
    VmContainersNotAllowed,
    VmDeleting,
    VmDiskTooSmall,
    VmHostForbidden,
    VmHostUnknown,
    VmImageUnknown,
    VmIsolationUnsupported,
    VmMemoryTooSmall,
    VmNameTaken,
    VmNetworkUnknown,
    VmNoCapacity,
    VmNotFound,
    VmProtected,
    VmSshKeyInvalid,
    VmStopped,
)
from controlplane.resources.vm.queries import ShownVm
from controlplane.resources.vm.schemas import VmCreate, VmResize, VmUpdate, VmView

noun = Noun("vm", "vms")
router = noun.router


@noun.create(
    VmView,
    errors=[
        VmNameTaken,
        VmNoCapacity,
        QuotaExceeded,
        NetworkFull,
        ImageNotAvailable,
        VmImageUnknown,
        VmNetworkUnknown,
        VmHostUnknown,
        VmHostForbidden,
        VmContainersNotAllowed,
        VmIsolationUnsupported,
        VmDiskTooSmall,
        VmMemoryTooSmall,
        VmSshKeyInvalid,
    ],
)
async def create(call: Call, body: VmCreate) -> ShownVm:
    """Make a VM: its share of a host, its address and its disk are taken at once, or nothing is made and 507 says why."""
    assert call.project is not None
    vm = await service.create(
        call.session, call.project, call.actor, call.services.sealer, body, limits=call.services.settings.limits
    )
    call.subject = vm
    return await queries.show(call.session, vm)


@noun.list(VmView)
async def list_(call: Call, page: Page) -> PageOf[ShownVm]:
    """List the VMs of a project."""
    found = await call.page(
        Vm,
        page,
        Vm.owner_id.is_(None),
        fields=["state", "power", "observed_power", "host_id", "image_id", "vcpus", "memory_bytes"],
    )
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(VmView, errors=[VmNotFound])
async def show(call: Call, vm: Ref) -> ShownVm:
    """Show one VM."""
    return await queries.show(call.session, await call.load(Vm, vm))


@noun.update(VmView, errors=[VmNotFound, VmDeleting])
async def update(call: Call, vm: Ref, body: VmUpdate) -> ShownVm:
    """Change the fields that are sent."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.update(call.session, row, body)
    return answer


@noun.action("start", VmView, errors=[VmNotFound, VmDeleting])
async def start(call: Call, vm: Ref) -> ShownVm:
    """Want it running."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.start(call.session, row)
    return answer


@noun.action("stop", VmView, errors=[VmNotFound, VmDeleting])
async def stop(call: Call, vm: Ref) -> ShownVm:
    """Want it stopped: an orderly power-off, after a grace a hard one. Its share of the host stays reserved."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.stop(call.session, row)
    return answer


@noun.action("restart", VmView, errors=[VmNotFound, VmDeleting, VmStopped])
async def restart(call: Call, vm: Ref) -> ShownVm:
    """Stop and start it once; a waiting resize applies."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.restart(call.session, row)
    return answer


@noun.action("resize", VmView, errors=[VmNotFound, VmDeleting, VmNoCapacity, VmMemoryTooSmall, QuotaExceeded])
async def resize(call: Call, vm: Ref, body: VmResize) -> ShownVm:
    """Change cores and memory; a running VM gets them at its next restart or start."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.resize(call.session, row, body)
    return answer


@noun.delete(VmView, errors=[VmProtected])
async def delete(call: Call, vm: Ref) -> ShownVm:
    """Delete it with its root disk and addresses."""
    row = await call.load(Vm, vm)
    answer = await queries.show(call.session, row)
    await service.remove(call.session, row)
    return answer


Tail = Annotated[int, Query(ge=0, le=1 << 24, description="How many of the last bytes to send first.", examples=[65536])]
Follow = Annotated[bool, Query(description="Go on with what the machine says from now on.", examples=[False])]


@noun.route(
    "GET",
    "/{vm}/log",
    "log",
    None,
    errors=[VmNotFound, StreamRefused, StreamUnavailable],
    answers={200: {"description": "What the serial console said.", "content": {"text/plain": {}}}},
    response_class=StreamingResponse,
)
async def log(call: Call, vm: Ref, tail_bytes: Tail = 65_536, follow: Follow = False) -> StreamingResponse:
    """What the machine said on its serial console, as raw bytes; with `follow` the answer has no end.

    It is cut when the right to it ends.
    """
    row = await call.load(Vm, vm)
    ticket = ticket_for(call, row, empty_ticket("log", tail_bytes=tail_bytes, follow=follow))
    await call.release()
    pipe = await open_stream(call.services, ticket)
    return StreamingResponse(cut_when_lost(chunks(pipe), standing_of(call)), media_type="text/plain; charset=utf-8")


@router.websocket("/{vm}/console")
async def console(websocket: WebSocket, vm: str) -> None:
    """The serial console: binary messages both ways."""
    await relay_socket(websocket, vm, "vm.console", empty_ticket("console"))


@router.websocket("/{vm}/port/{port}")
async def port(websocket: WebSocket, vm: str, port: int) -> None:
    """A TCP connection to a port of the VM, made by its host: binary messages both ways."""
    await relay_socket(websocket, vm, "vm.connect", empty_ticket("tcp", port=port))
