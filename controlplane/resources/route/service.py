"""Changes of routes. The one rule: a route names endpoints of its own project only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.models.provider import RouteProvider
from controlplane.models.route import Route, RouteRuleTarget, RouteTarget
from controlplane.resources.key.publish import publish
from controlplane.resources.route import queries
from controlplane.resources.route.errors import RouteTargetInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`endpoint` and `fallback`: name or id, or the model that exactly one endpoint serves."""

    endpoint: str
    weight: int = 1
    fallback: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`match`: as it is stored and read by gateways."""

    name: str
    match: dict[str, Json]
    targets: Sequence[Target]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a route is to be; None leaves a part as it is."""

    targets: Sequence[Target] | None = None
    rules: Sequence[Rule] | None = None
    retry: dict[str, Json] | None = None
    affinity: dict[str, Json] | None = None
    timeouts: dict[str, float] | None = None


async def create(session: AsyncSession, project_id: str, *, name: str, wanted: Wanted) -> Route:
    """A public model name; raises RouteTargetInvalid."""
    route = Route(id=new_id(Kind.ROUTE), project_id=project_id, name=name)
    session.add(route)
    await session.flush()
    await _set(session, route, wanted)
    return route


async def change(session: AsyncSession, route: Route, wanted: Wanted) -> None:
    route.generation += 1
    await _set(session, route, wanted)


async def remove(session: AsyncSession, route: Route) -> None:
    await session.delete(route)
    await publish(session, "routes")


async def _set(session: AsyncSession, route: Route, wanted: Wanted) -> None:
    if wanted.targets is not None:
        await session.execute(delete(RouteTarget).where(RouteTarget.route_id == route.id))
        targets = await _set_outside(session, route, "", wanted.targets, "/targets")
        for endpoint_id, fallback_id, weight in await _resolve(session, route, targets, "/targets"):
            session.add(
                RouteTarget(route_id=route.id, endpoint_id=endpoint_id, fallback_endpoint_id=fallback_id, weight=weight)
            )
    if wanted.rules is not None:
        await _set_rules(session, route, wanted.rules)
    if wanted.retry is not None:
        route.retry = wanted.retry
    if wanted.affinity is not None:
        route.affinity = wanted.affinity
    if wanted.timeouts is not None:
        route.timeouts = {**wanted.timeouts}
    await publish(session, "routes")


async def _set_rules(session: AsyncSession, route: Route, rules: Sequence[Rule]) -> None:
    await session.execute(delete(RouteRuleTarget).where(RouteRuleTarget.route_id == route.id))
    await session.execute(delete(RouteProvider).where(RouteProvider.route_id == route.id, RouteProvider.rule != ""))
    names: set[str] = set()
    for index, rule in enumerate(rules):
        if rule.name in names or rule.name == "default":
            raise _invalid(f"/rules/{index}/name", f"{rule.name} is the name of another rule")
        names.add(rule.name)
        targets = await _set_outside(session, route, rule.name, rule.targets, f"/rules/{index}/targets")
        for endpoint_id, fallback_id, weight in await _resolve(session, route, targets, f"/rules/{index}/targets"):
            row = RouteRuleTarget(route_id=route.id, rule=rule.name, endpoint_id=endpoint_id, weight=weight)
            row.fallback_endpoint_id = fallback_id
            session.add(row)
    route.rules = [{"name": rule.name, "match": rule.match} for rule in rules]


async def _set_outside(session: AsyncSession, route: Route, rule: str, targets: Sequence[Target], pointer: str) -> list[Target]:
    """Set the targets and fallbacks that are providers' (`provider/model`); returns the endpoints, without such fallbacks."""
    await session.execute(delete(RouteProvider).where(RouteProvider.route_id == route.id, RouteProvider.rule == rule))
    named = [ref for target in targets for ref in (target.endpoint, target.fallback) if ref and "/" in ref]
    offered = await queries.offered(session, route.project_id, named) if named else {}
    inside = await queries.endpoints(session, route.project_id, named) if named else {}
    rest: list[Target] = []
    for index, target in enumerate(targets):
        fallback = target.fallback
        if target.endpoint in offered and target.endpoint not in inside:
            if fallback is not None:
                raise _invalid(f"{pointer}/{index}/fallback", "a provider's model has no fallback: name another target")
            session.add(_outside(route, rule, "", (*offered[target.endpoint], target.weight)))
            continue
        if fallback in offered and fallback not in inside:
            (found,) = await _resolve(session, route, [replace(target, fallback=None)], f"{pointer}/{index}")
            session.add(_outside(route, rule, found[0], (*offered[str(fallback)], 0)))
            fallback = None
        rest.append(replace(target, fallback=fallback))
    return rest


def _outside(route: Route, rule: str, fallback_of: str, of: tuple[str, str, int]) -> RouteProvider:
    provider_id, model, weight = of
    return RouteProvider(
        route_id=route.id, rule=rule, fallback_of=fallback_of, provider_id=provider_id, model=model, weight=weight
    )


async def _resolve(
    session: AsyncSession, route: Route, targets: Sequence[Target], pointer: str
) -> list[tuple[str, str | None, int]]:
    """(endpoint id, fallback's id, weight) of each target; raises RouteTargetInvalid."""
    named = [target.endpoint for target in targets] + [target.fallback for target in targets if target.fallback]
    found = await queries.endpoints(session, route.project_id, named)
    resolved: list[tuple[str, str | None, int]] = []
    for index, target in enumerate(targets):
        endpoint_id = _found(found, target.endpoint, f"{pointer}/{index}/endpoint")
        if any(endpoint_id == other for other, _, _ in resolved):
            raise _invalid(f"{pointer}/{index}/endpoint", "named twice")
        fallback_id = None
        if target.fallback is not None:
            fallback_id = _found(found, target.fallback, f"{pointer}/{index}/fallback")
            if fallback_id == endpoint_id:
                raise _invalid(f"{pointer}/{index}/fallback", "the fallback is the endpoint itself")
        resolved.append((endpoint_id, fallback_id, target.weight))
    return resolved


def _found(found: dict[str, str | None], ref: str, pointer: str) -> str:
    if ref not in found:
        raise _invalid(pointer, f"no endpoint {ref} in this project, nor one that serves a model of that name")
    endpoint_id = found[ref]
    if endpoint_id is None:
        raise _invalid(pointer, f"several endpoints serve {ref}: name one of them")
    return endpoint_id


def _invalid(pointer: str, detail: str) -> RouteTargetInvalid:
    return RouteTargetInvalid(detail, errors=(FieldError(pointer=pointer, detail=detail),))
