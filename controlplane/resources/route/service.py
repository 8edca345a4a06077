"""Changes of routes. The one rule: a route names endpoints of its own project only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.models.route import Route, RouteTarget
from controlplane.resources.key.publish import publish
from controlplane.resources.route import queries
from controlplane.resources.route.errors import RouteTargetInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`endpoint`: name or id."""

    endpoint: str
    weight: int = 1


async def create(
    session: AsyncSession, project_id: str, *, name: str, targets: Sequence[Target], timeouts: dict[str, float] | None = None
) -> Route:
    """A public model name; raises RouteTargetInvalid."""
    route = Route(id=new_id(Kind.ROUTE), project_id=project_id, name=name, timeouts={**(timeouts or {})})
    session.add(route)
    await session.flush()
    await _set_targets(session, route, targets)
    await publish(session, "routes")
    return route


async def change(
    session: AsyncSession, route: Route, *, targets: Sequence[Target] | None = None, timeouts: dict[str, float] | None = None
) -> None:
    if targets is not None:
        await session.execute(delete(RouteTarget).where(RouteTarget.route_id == route.id))
        await _set_targets(session, route, targets)
    if timeouts is not None:
        route.timeouts = {**timeouts}
    route.generation += 1
    await publish(session, "routes")


async def remove(session: AsyncSession, route: Route) -> None:
    await session.delete(route)
    await publish(session, "routes")


async def _set_targets(session: AsyncSession, route: Route, targets: Sequence[Target]) -> None:
    found = await queries.endpoints(session, route.project_id, [target.endpoint for target in targets])
    seen: set[str] = set()
    for index, target in enumerate(targets):
        endpoint_id = found.get(target.endpoint)
        if endpoint_id is None or endpoint_id in seen:
            detail = "named twice" if endpoint_id else f"no endpoint {target.endpoint} in this project"
            raise RouteTargetInvalid(detail, errors=(FieldError(pointer=f"/targets/{index}/endpoint", detail=detail),))
        seen.add(endpoint_id)
        session.add(RouteTarget(route_id=route.id, endpoint_id=endpoint_id, weight=target.weight))
    await session.flush()
