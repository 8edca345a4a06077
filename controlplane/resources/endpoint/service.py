"""Changes of endpoints. The one rule: every replica that a request asks for is placed in the request's own transaction."""

from __future__ import annotations

from sqlalchemy import delete, exists, func, select
from sqlalchemy import update as update_rows
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.kernel import service as kernel
from controlplane.models.endpoint import Endpoint
from controlplane.models.network import Network
from controlplane.models.project import Project
from controlplane.models.replica import Replica
from controlplane.models.route import Route, RouteRuleTarget, RouteTarget
from controlplane.resources.endpoint import revision as revisions
from controlplane.resources.endpoint.errors import (
    EndpointAutoscaled,
    EndpointDeleting,
    EndpointNetworkUnknown,
    EndpointNoCapacity,
)
from controlplane.resources.endpoint.schemas import EndpointCreate, EndpointUpdate
from controlplane.resources.key.publish import publish
from controlplane.resources.network import service as networks
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.resources.replica import service as replicas
from controlplane.settings import NetworkSettings

PROGRAM = "endpoint"
DEFAULT_NETWORK = "endpoints"


async def create(session: AsyncSession, settings: NetworkSettings, project: Project, wanted: EndpointCreate) -> Endpoint:
    """Write the endpoint with its replicas and its route; raises the errors of this noun, keeping nothing."""
    template = await revisions.template(session, project, wanted.isolation, wanted)
    endpoint = Endpoint(
        id=new_id(Kind.ENDPOINT),
        project_id=project.id,
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
        model=template.model,
        spec=template.spec,
        network_id=await _network_id(session, settings, project.id, wanted.network),
        replicas=wanted.replicas,
        isolation=wanted.isolation,
        vcpus=template.vcpus,
        memory_bytes=template.memory_bytes,
        state="active",
        autoscale=None if wanted.autoscale is None else wanted.autoscale.model_dump(),
        max_in_flight=wanted.max_in_flight,
    )
    session.add(endpoint)
    await session.flush()
    await revisions.record(session, endpoint)
    await _grow(session, endpoint, wanted.replicas, can_wait=wanted.on_no_capacity == "wait")
    if wanted.has_route:
        route = Route(id=new_id(Kind.ROUTE), project_id=project.id, name=wanted.route or template.model)
        session.add(route)
        await session.flush()
        session.add(RouteTarget(route_id=route.id, endpoint_id=endpoint.id))
    await kernel.start(session, PROGRAM, endpoint.id)
    await publish(session, "routes")
    return endpoint


async def update(session: AsyncSession, endpoint: Endpoint, changes: EndpointUpdate) -> None:
    """Change what was sent; another model or shape is rolled out to the replicas."""
    await _tell(session, endpoint)
    given = changes.model_dump(exclude_unset=True, exclude={"model", "vcpus", "memory_bytes", "rollout"})
    for name, value in given.items():
        setattr(endpoint, name, value)
    is_new = bool({"model", "vcpus", "memory_bytes"} & changes.model_fields_set)
    is_begun = is_new and await revisions.change(session, endpoint, changes)
    if is_begun or {"autoscale", "max_in_flight"} & changes.model_fields_set:
        endpoint.generation += 1
        await publish(session, "routes")


async def promote(session: AsyncSession, endpoint: Endpoint) -> None:
    """End the watching of a roll-out: the other replicas follow. Raises EndpointNotRollingOut."""
    await _tell(session, endpoint)
    await revisions.promote(session, endpoint)


async def roll_back(session: AsyncSession, endpoint: Endpoint) -> None:
    """Back to the revision before: of a roll-out that goes on at once, else by a roll-out of its own."""
    await _tell(session, endpoint)
    await revisions.roll_back(session, endpoint)
    endpoint.generation += 1
    await publish(session, "routes")


async def scale(session: AsyncSession, endpoint: Endpoint, count: int) -> None:
    """Want `count` replicas: more are placed at once, or none is made and EndpointNoCapacity says why."""
    if endpoint.autoscale is not None:
        raise EndpointAutoscaled(f"{endpoint.name} has as many replicas as its load asks for; change `autoscale` instead")
    await _tell(session, endpoint)
    if endpoint.rollout is not None:  # its program counts, with the surge
        endpoint.replicas = count
        endpoint.generation += 1
        return
    here = select(func.count()).select_from(Replica).where(Replica.endpoint_id == endpoint.id, Replica.state != "deleting")
    have = await session.scalar(here) or 0
    if count > have:
        await _grow(session, endpoint, count - have, can_wait=False, have=have)
    endpoint.replicas = count
    endpoint.generation += 1
    await session.flush()


async def resize(session: AsyncSession, endpoint: Endpoint, count: int) -> str | None:
    """What the autoscaler wants: as many as there is room for. Returns what ran short, None when all were placed."""
    await kernel.start(session, PROGRAM, endpoint.id)
    if endpoint.rollout is not None:  # its program counts, with the surge
        endpoint.replicas = count
        return None
    shortage: str | None = None
    here = select(func.count()).select_from(Replica).where(Replica.endpoint_id == endpoint.id, Replica.state != "deleting")
    total = await session.scalar(here) or 0
    while total < count and shortage is None:
        try:
            async with session.begin_nested():
                await _grow(session, endpoint, 1, can_wait=False)
            total += 1
        except EndpointNoCapacity as error:
            shortage = error.detail
    endpoint.replicas = count if shortage is None else max(total, min(endpoint.replicas, count))
    endpoint.shortage = None if shortage is None else {"detail": shortage}
    await publish(session, "routes")
    return shortage


async def remove(session: AsyncSession, endpoint: Endpoint) -> None:
    """Begin to delete: its routes lead elsewhere or end, its replicas drain and go. Doing it twice is once."""
    if endpoint.state == "deleting":
        return
    await kernel.start(session, PROGRAM, endpoint.id)
    await kernel.destroy(session, PROGRAM, endpoint.id)
    await forget_routes(session, endpoint.id)
    await publish(session, "routes")
    endpoint.state, endpoint.deleting_at = "deleting", func.now()


async def forget_routes(session: AsyncSession, endpoint_id: str) -> None:
    """Take the endpoint out of every route; a route without any other target goes with it."""
    for table in (RouteTarget, RouteRuleTarget):
        falls_back = update_rows(table).where(table.fallback_endpoint_id == endpoint_id).values(fallback_endpoint_id=None)
        await session.execute(falls_back.execution_options(synchronize_session=False))
    ruled = delete(RouteRuleTarget).where(RouteRuleTarget.endpoint_id == endpoint_id)
    await session.execute(ruled.execution_options(synchronize_session=False))
    mine = RouteTarget.endpoint_id == endpoint_id
    route_ids = list(await session.scalars(select(RouteTarget.route_id).where(mine)))
    await session.execute(delete(RouteTarget).where(mine).execution_options(synchronize_session=False))
    empty = delete(Route).where(Route.id.in_(route_ids), ~exists().where(RouteTarget.route_id == Route.id))
    await session.execute(empty.execution_options(synchronize_session=False))


async def _grow(session: AsyncSession, endpoint: Endpoint, count: int, *, can_wait: bool, have: int = 0) -> None:
    """`have`: how many there are already, for what is said when there is no room."""
    for made in range(count):
        _, vm = await replicas.create(session, endpoint)
        if vm.host_id is None and not can_wait:
            assert vm.shortage is not None
            detail = str(vm.shortage["detail"])
            if have + count > 1:
                detail = f"wanted {have + count} replicas, room for {have + made}: {detail}"
            raise EndpointNoCapacity(detail, placement=vm.shortage, wanted=have + count, room=have + made)


async def _tell(session: AsyncSession, endpoint: Endpoint) -> None:
    if endpoint.state == "deleting":
        raise EndpointDeleting(f"{endpoint.name} is being deleted")
    await kernel.start(session, PROGRAM, endpoint.id)


async def _network_id(session: AsyncSession, settings: NetworkSettings, project_id: str, ref: str | None) -> str:
    column = Network.id if ref is not None and is_id(ref, Kind.NETWORK) else Network.name
    query = select(Network.id).where(column == (ref or DEFAULT_NETWORK), Network.project_id == project_id)
    found = await session.scalar(query)
    if found is None and ref is not None:
        raise EndpointNetworkUnknown(f"no network {ref}", errors=(FieldError(pointer="/network", detail=f"no network {ref}"),))
    if found is None:  # two endpoints made at once: the second waits here, and takes what the first has made
        await session.execute(select(Project.id).where(Project.id == project_id).with_for_update(key_share=True))
        found = await session.scalar(query)
    if found is None:
        made = await networks.create(session, settings, project_id, NetworkCreate(name=DEFAULT_NETWORK, firewall=None))
        found = made.id
    return found
