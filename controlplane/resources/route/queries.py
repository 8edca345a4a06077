"""Reads of routes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import literal, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from controlplane.models.endpoint import Endpoint
from controlplane.models.provider import Provider, RouteProvider
from controlplane.models.route import RouteRuleTarget, RouteTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTarget:
    """`rule` is empty for the route's own targets; `fallback` is an endpoint's name."""

    rule: str
    endpoint_id: str
    endpoint: str
    weight: int
    fallback: str | None


async def endpoints(session: AsyncSession, project_id: str, refs: Sequence[str]) -> dict[str, str | None]:
    """Id of each endpoint of the project named in `refs` by id, by name, or, last, by the model it serves.

    None where several endpoints serve the model; what is not there is left out.
    """
    query = select(Endpoint.id, Endpoint.name, Endpoint.model).where(
        Endpoint.project_id == project_id,
        Endpoint.state == "active",
        or_(Endpoint.id.in_(refs), Endpoint.name.in_(refs), Endpoint.model.in_(refs)),
    )
    rows = (await session.execute(query)).all()
    found: dict[str, str | None] = {}
    for endpoint_id, _, model in rows:
        found[model] = None if model in found else endpoint_id
    for endpoint_id, name, _ in rows:
        found[endpoint_id] = found[name] = endpoint_id
    return {ref: endpoint_id for ref, endpoint_id in found.items() if ref in refs}


async def offered(session: AsyncSession, project_id: str, refs: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Provider's id and model of each `provider/model` in `refs` that the project may use."""
    query = select(Provider.id, Provider.name, Provider.models).where(
        or_(Provider.project_ids.is_(None), Provider.project_ids.contains([project_id]))
    )
    found = {
        f"{name}/{model}": (provider_id, model)
        for provider_id, name, models in await session.execute(query)
        for model in models
    }
    return {ref: found[ref] for ref in refs if ref in found}


async def targets(session: AsyncSession, route_ids: Sequence[str]) -> dict[str, list[ShownTarget]]:
    """The targets of each route, those of its rules among them."""
    own = select(
        RouteTarget.route_id,
        literal("").label("rule"),
        RouteTarget.endpoint_id,
        RouteTarget.weight,
        RouteTarget.fallback_endpoint_id,
    )
    of_rules = select(
        RouteRuleTarget.route_id,
        RouteRuleTarget.rule,
        RouteRuleTarget.endpoint_id,
        RouteRuleTarget.weight,
        RouteRuleTarget.fallback_endpoint_id,
    )
    every = union_all(own, of_rules).subquery()
    fallback = aliased(Endpoint)
    query = (
        select(every.c.route_id, every.c.rule, Endpoint.id, Endpoint.name, every.c.weight, fallback.name)
        .join(Endpoint, Endpoint.id == every.c.endpoint_id)
        .outerjoin(fallback, fallback.id == every.c.fallback_endpoint_id)
        .where(every.c.route_id.in_(route_ids))
        .order_by(Endpoint.name)
    )
    found: dict[str, list[ShownTarget]] = {route_id: [] for route_id in route_ids}
    for route_id, rule, endpoint_id, name, weight, fallback_name in await session.execute(query):
        shown = ShownTarget(rule=rule, endpoint_id=endpoint_id, endpoint=name, weight=weight, fallback=fallback_name)
        found[route_id].append(shown)
    await _add_outside(session, found)
    return found


async def _add_outside(session: AsyncSession, found: dict[str, list[ShownTarget]]) -> None:
    """Providers' models: as targets, and as fallbacks of those that are shown already."""
    query = (
        select(RouteProvider, Provider.name)
        .join(Provider, Provider.id == RouteProvider.provider_id)
        .where(RouteProvider.route_id.in_(list(found)))
    )
    for row, provider in await session.execute(query):
        shown, name = found[row.route_id], f"{provider}/{row.model}"
        if not row.fallback_of:
            shown.append(
                ShownTarget(rule=row.rule, endpoint_id=row.provider_id, endpoint=name, weight=row.weight, fallback=None)
            )
            continue
        for place, target in enumerate(shown):
            if (target.rule, target.endpoint_id) == (row.rule, row.fallback_of):
                shown[place] = replace(target, fallback=name)
