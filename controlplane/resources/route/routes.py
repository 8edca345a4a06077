"""`/v1/projects/{project}/routes`: public model names and the endpoints behind them."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.route import Route
from controlplane.resources.route import queries, service
from controlplane.resources.route.errors import RouteNameTaken, RouteNotFound, RouteTargetInvalid
from controlplane.resources.route.schemas import (
    RouteCreate,
    RouteTargetIn,
    RouteTargetView,
    RouteTimeouts,
    RouteUpdate,
    RouteView,
)

noun = Noun("route", "routes", has_operations=False)
router = noun.router


@noun.create(RouteView, errors=[RouteNameTaken, RouteTargetInvalid])
async def create(call: Call, body: RouteCreate) -> RouteView:
    """Give a public model name to one or several endpoints."""
    row = await service.create(
        call.session, call.project_id, name=body.name, targets=_targets(body.targets), timeouts=_timeouts(body.timeouts)
    )
    call.subject = row
    return (await _views(call, [row]))[0]


@noun.list(RouteView)
async def list_(call: Call, page: Page) -> PageOf[RouteView]:  # pyright: ignore[reportInvalidTypeArguments]
    """List the routes of a project."""
    found = await call.page(Route, page)
    return PageOf(items=await _views(call, found.items), next_page_token=found.next_page_token)  # pyright: ignore[reportArgumentType]


@noun.show(RouteView, errors=[RouteNotFound])
async def show(call: Call, route: Ref) -> RouteView:
    """Show one route."""
    return (await _views(call, [await call.load(Route, route)]))[0]


@noun.update(RouteView, errors=[RouteNotFound, RouteTargetInvalid])
async def update(call: Call, route: Ref, body: RouteUpdate) -> RouteView:
    """Change where a public model name leads; in force within a second."""
    row = await call.load(Route, route)
    targets = None if body.targets is None else _targets(body.targets)
    timeouts = None if body.timeouts is None else _timeouts(body.timeouts)
    await service.change(call.session, row, targets=targets, timeouts=timeouts)
    return (await _views(call, [row]))[0]


@noun.delete(RouteView)
async def delete(call: Call, route: Ref) -> None:
    """Take a public model name away; its endpoints stay."""
    await service.remove(call.session, await call.load(Route, route))


def _targets(given: list[RouteTargetIn]) -> list[service.Target]:
    return [service.Target(endpoint=target.endpoint, weight=target.weight) for target in given]


def _timeouts(given: RouteTimeouts) -> dict[str, float]:
    return given.model_dump(exclude_none=True)


async def _views(call: Call, rows: list[Route]) -> list[RouteView]:
    for row in rows:
        await call.session.refresh(row)
    targets = await queries.targets(call.session, [row.id for row in rows])
    views = []
    for row in rows:
        view = RouteView.model_validate(row)
        view.targets = [
            RouteTargetView(endpoint_id=endpoint_id, endpoint=name, weight=weight)
            for endpoint_id, name, weight in targets[row.id]
        ]
        views.append(view)
    return views
