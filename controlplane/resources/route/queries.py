"""Reads of routes."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.endpoint import Endpoint
from controlplane.models.route import RouteTarget


async def endpoints(session: AsyncSession, project_id: str, refs: Sequence[str]) -> dict[str, str]:
    """Id of each endpoint of the project named (by id or name) in `refs`; what is not there is left out."""
    query = select(Endpoint.id, Endpoint.name).where(
        Endpoint.project_id == project_id, Endpoint.state == "active", or_(Endpoint.id.in_(refs), Endpoint.name.in_(refs))
    )
    found: dict[str, str] = {}
    for endpoint_id, name in await session.execute(query):
        found[endpoint_id] = found[name] = endpoint_id
    return found


async def targets(session: AsyncSession, route_ids: Sequence[str]) -> dict[str, list[tuple[str, str, int]]]:
    """(endpoint id, endpoint name, weight) of each target, by route."""
    query = (
        select(RouteTarget.route_id, Endpoint.id, Endpoint.name, RouteTarget.weight)
        .join(Endpoint, Endpoint.id == RouteTarget.endpoint_id)
        .where(RouteTarget.route_id.in_(route_ids))
        .order_by(Endpoint.name)
    )
    found: dict[str, list[tuple[str, str, int]]] = {route_id: [] for route_id in route_ids}
    for route_id, endpoint_id, name, weight in await session.execute(query):
        found[route_id].append((endpoint_id, name, weight))
    return found
