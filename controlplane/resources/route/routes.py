"""`/v1/projects/{project}/routes`: public model names and the endpoints behind them."""

from __future__ import annotations

from typing import Any

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.route import Route
from controlplane.resources.route import queries, service
from controlplane.resources.route.errors import RouteNameTaken, RouteNotFound, RouteTargetInvalid
from controlplane.resources.route.schemas import (
    Affinity,
    RetryPolicyView,
    RouteCreate,
    RouteRuleView,
    RouteTargetIn,
    RouteTargetView,
    RouteUpdate,
    RouteView,
)

noun = Noun("route", "routes", has_operations=False)
router = noun.router


@noun.create(RouteView, errors=[RouteNameTaken, RouteTargetInvalid])
async def create(call: Call, body: RouteCreate) -> RouteView:
    """Give a public model name to one or several endpoints."""
    row = await service.create(call.session, call.project_id, name=body.name, wanted=_wanted(body))
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
    await service.change(call.session, row, _wanted(body))
    return (await _views(call, [row]))[0]


@noun.delete(RouteView)
async def delete(call: Call, route: Ref) -> None:
    """Take a public model name away; its endpoints stay."""
    await service.remove(call.session, await call.load(Route, route))


def _wanted(body: RouteCreate | RouteUpdate) -> service.Wanted:
    return service.Wanted(
        targets=None if body.targets is None else _targets(body.targets),
        rules=None
        if body.rules is None
        else [
            service.Rule(
                name=rule.name,
                match=rule.match.model_dump(exclude_defaults=True, mode="json"),
                targets=_targets(rule.targets),
            )
            for rule in body.rules
        ],
        retry=None if body.retry_policy is None else body.retry_policy.stored(),
        affinity=None if body.affinity is None else body.affinity.model_dump(),
        timeouts=None if body.timeouts is None else body.timeouts.model_dump(exclude_none=True),
    )


def _targets(given: list[RouteTargetIn]) -> list[service.Target]:
    return [service.Target(endpoint=target.endpoint, weight=target.weight, fallback=target.fallback) for target in given]


async def _views(call: Call, rows: list[Route]) -> list[RouteView]:
    for row in rows:
        await call.session.refresh(row)
    targets = await queries.targets(call.session, [row.id for row in rows])
    return [_view(row, targets[row.id]) for row in rows]


def _view(row: Route, targets: list[queries.ShownTarget]) -> RouteView:
    def of(rule: str) -> list[RouteTargetView]:
        return [RouteTargetView.model_validate(target) for target in targets if target.rule == rule]

    rules: Any = row.rules
    retry: Any = row.retry
    return RouteView(
        id=row.id,
        name=row.name,
        generation=row.generation,
        created_at=row.created_at,
        updated_at=row.updated_at,
        targets=of(""),
        rules=[RouteRuleView(name=rule["name"], match=rule["match"], targets=of(rule["name"])) for rule in rules],
        retry_policy=RetryPolicyView(max_attempts=retry.get("max_attempts", 3), backoff=f"{retry.get('backoff_ms', 0)}ms"),
        affinity=Affinity.model_validate(row.affinity),
        timeouts=row.timeouts,  # pyright: ignore[reportArgumentType]
    )
