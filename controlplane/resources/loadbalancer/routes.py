"""Load balancers over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.resources.loadbalancer import queries, service
from controlplane.resources.loadbalancer.errors import (
    LoadbalancerAddressInUse,
    LoadbalancerAddressUnknown,
    LoadbalancerBackendNotFound,
    LoadbalancerBackendTaken,
    LoadbalancerBackendUnknown,
    LoadbalancerDeleting,
    LoadbalancerLimitReached,
    LoadbalancerListenerTaken,
    LoadbalancerNameTaken,
    LoadbalancerNetworkUnknown,
    LoadbalancerNoAddress,
    LoadbalancerNotFound,
    LoadbalancerTooManyBackends,
)
from controlplane.resources.loadbalancer.queries import ShownLoadbalancer
from controlplane.resources.loadbalancer.schemas import (
    Alerts,
    BackendInput,
    BackendUpdate,
    Eject,
    LoadbalancerCreate,
    LoadbalancerUpdate,
    LoadbalancerView,
)
from controlplane.resources.network.errors import NetworkFull

noun = Noun("loadbalancer", "loadbalancers")
router = noun.router

_BACKEND = "/{loadbalancer}/backends/{backend}"
_WRITE = [LoadbalancerNotFound, LoadbalancerDeleting]
_ONE = [*_WRITE, LoadbalancerBackendNotFound]


async def _active(call: Call, ref: str) -> Loadbalancer:
    row = await call.load(Loadbalancer, ref)
    service.check_active(row)
    return row


@noun.create(
    LoadbalancerView,
    errors=[
        LoadbalancerNameTaken,
        LoadbalancerLimitReached,
        LoadbalancerNetworkUnknown,
        LoadbalancerNoAddress,
        LoadbalancerAddressUnknown,
        LoadbalancerAddressInUse,
        LoadbalancerBackendUnknown,
        LoadbalancerBackendTaken,
        LoadbalancerListenerTaken,
        NetworkFull,
    ],
)
async def create(call: Call, body: LoadbalancerCreate) -> ShownLoadbalancer:
    """Make a load balancer with its ports, addresses and backends."""
    row = await service.create(call.session, call.services.settings.limits, call.project_id, body)
    call.subject = row
    return await queries.show(call.session, row)


@noun.list(LoadbalancerView)
async def list_(call: Call, page: Page) -> PageOf[ShownLoadbalancer]:
    """The load balancers of the project."""
    found = await call.page(Loadbalancer, page, fields=["state", "profile"])
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(LoadbalancerView, errors=[LoadbalancerNotFound])
async def show(call: Call, loadbalancer: Ref) -> ShownLoadbalancer:
    """One load balancer, and what its edge hosts see of each backend."""
    return await queries.show(call.session, await call.load(Loadbalancer, loadbalancer))


@noun.update(LoadbalancerView, errors=[*_WRITE, LoadbalancerListenerTaken])
async def update(call: Call, loadbalancer: Ref, body: LoadbalancerUpdate) -> ShownLoadbalancer:
    """Change the fields that are sent; `listeners` replaces all ports at once."""
    row = await _active(call, loadbalancer)
    await service.update(call.session, row, body)
    return await queries.show(call.session, row)


@noun.route(
    "POST",
    "/{loadbalancer}/backends",
    "add",
    LoadbalancerView,
    errors=[*_WRITE, LoadbalancerBackendUnknown, LoadbalancerBackendTaken, LoadbalancerTooManyBackends],
)
async def add(call: Call, loadbalancer: Ref, body: BackendInput) -> ShownLoadbalancer:
    """Add a backend; new flows reach it when its probe does."""
    row = await _active(call, loadbalancer)
    await service.add_backend(call.session, row, body)
    return await queries.show(call.session, row)


@noun.route("PATCH", _BACKEND, "update-backend", LoadbalancerView, errors=_ONE)
async def update_backend(call: Call, loadbalancer: Ref, backend: Ref, body: BackendUpdate) -> ShownLoadbalancer:
    """Change a backend's weight: new flows are shared by it, open ones stay where they are."""
    row = await _active(call, loadbalancer)
    await service.weigh_backend(call.session, row, backend, body.weight)
    return await queries.show(call.session, row)


@noun.route("POST", f"{_BACKEND}/remove", "remove-backend", LoadbalancerView, errors=_ONE)
async def remove(call: Call, loadbalancer: Ref, backend: Ref) -> ShownLoadbalancer:
    """Take a backend away at once, by its id, or name or id of its VM or endpoint; its open flows end."""
    row = await _active(call, loadbalancer)
    await service.remove_backend(call.session, row, backend)
    return await queries.show(call.session, row)


@noun.route("POST", f"{_BACKEND}/drain", "drain", LoadbalancerView, errors=_ONE)
async def drain(call: Call, loadbalancer: Ref, backend: Ref) -> ShownLoadbalancer:
    """Send nothing new to a backend; its open flows have `drain_seconds` to end."""
    row = await _active(call, loadbalancer)
    await service.drain(call.session, row, backend)
    return await queries.show(call.session, row)


@noun.route("POST", f"{_BACKEND}/activate", "activate", LoadbalancerView, errors=_ONE)
async def activate(call: Call, loadbalancer: Ref, backend: Ref) -> ShownLoadbalancer:
    """Undo draining and ejection."""
    row = await _active(call, loadbalancer)
    await service.activate(call.session, row, backend)
    return await queries.show(call.session, row)


@noun.route("POST", f"{_BACKEND}/eject", "eject", LoadbalancerView, errors=_ONE)
async def eject(call: Call, loadbalancer: Ref, backend: Ref, body: Eject) -> ShownLoadbalancer:
    """Take a backend out for a while, open flows included. This is where Alertmanager's webhook points at."""
    row = await _active(call, loadbalancer)
    await service.eject(call.session, row, backend, body, call.services.clock.now())
    return await queries.show(call.session, row)


@noun.route("POST", "/{loadbalancer}/eject", "eject-by-alerts", LoadbalancerView, errors=_ONE)
async def eject_by_alerts(call: Call, loadbalancer: Ref, body: Alerts) -> ShownLoadbalancer:
    """One webhook for all backends: each that an alert's label `backend` names is taken out, or brought back when resolved."""
    row = await _active(call, loadbalancer)
    await service.eject_by_alerts(call.session, row, body, call.services.clock.now())
    return await queries.show(call.session, row)


@noun.delete(LoadbalancerView)
async def delete(call: Call, loadbalancer: Ref) -> ShownLoadbalancer:
    """Delete it: nothing new is let in, open flows have `drain_seconds`, then it is gone; reserved addresses stay."""
    row = await call.load(Loadbalancer, loadbalancer)
    answer = await queries.show(call.session, row)
    await service.remove(call.session, row)
    return answer
