"""`/v1/projects/{project}/endpoints`: replicas of a model that applications call through the gateway."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.endpoint import Endpoint
from controlplane.resources.endpoint import queries, service
from controlplane.resources.endpoint.errors import (
    EndpointAutoscaled,
    EndpointContainersNotAllowed,
    EndpointDeleting,
    EndpointGuestMissing,
    EndpointIsolationUnsupported,
    EndpointMemoryTooSmall,
    EndpointNameTaken,
    EndpointNetworkUnknown,
    EndpointNoCapacity,
    EndpointNoEarlierRevision,
    EndpointNotAccelerated,
    EndpointNotFound,
    EndpointNotRollingOut,
    EndpointRollingOut,
)
from controlplane.resources.endpoint.queries import ShownEndpoint
from controlplane.resources.endpoint.schemas import (
    DecisionList,
    DecisionView,
    EndpointCreate,
    EndpointScale,
    EndpointUpdate,
    EndpointView,
    RevisionList,
    RevisionView,
)
from controlplane.resources.model.errors import ModelNotAvailable
from controlplane.resources.network.errors import NetworkFull

Limit = Annotated[int, Query(ge=1, le=1000, description="The latest so many.", examples=[20])]

noun = Noun("endpoint", "endpoints")
router = noun.router


@noun.create(
    EndpointView,
    errors=[
        EndpointNameTaken,
        EndpointNoCapacity,
        EndpointContainersNotAllowed,
        EndpointIsolationUnsupported,
        EndpointNotAccelerated,
        EndpointGuestMissing,
        EndpointMemoryTooSmall,
        EndpointNetworkUnknown,
        ModelNotAvailable,
        NetworkFull,
    ],
)
async def create(call: Call, body: EndpointCreate) -> ShownEndpoint:
    """Serve a model: every replica takes its share of a host at once, or nothing is made and 507 says why."""
    assert call.project is not None
    endpoint = await service.create(call.session, call.services.settings.network, call.project, body)
    call.subject = endpoint
    return await queries.show(call.session, endpoint)


@noun.list(EndpointView)
async def list_(call: Call, page: Page) -> PageOf[ShownEndpoint]:
    """List the endpoints of a project."""
    found = await call.page(Endpoint, page, fields=["state", "model", "replicas", "ready_replicas"])
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(EndpointView, errors=[EndpointNotFound])
async def show(call: Call, endpoint: Ref) -> ShownEndpoint:
    """Show one endpoint with its replicas."""
    return await queries.show(call.session, await call.load(Endpoint, endpoint))


@noun.update(
    EndpointView,
    errors=[
        EndpointNotFound,
        EndpointDeleting,
        EndpointRollingOut,
        EndpointContainersNotAllowed,
        EndpointIsolationUnsupported,
        EndpointNotAccelerated,
        EndpointGuestMissing,
        EndpointMemoryTooSmall,
        ModelNotAvailable,
    ],
)
async def update(call: Call, endpoint: Ref, body: EndpointUpdate) -> ShownEndpoint:
    """Change the fields that are sent; another model or shape is rolled out, and taken back when it does worse."""
    row = await call.load(Endpoint, endpoint)
    answer = await queries.show(call.session, row)
    await service.update(call.session, row, body)
    return answer


@noun.action(
    "scale", EndpointView, errors=[EndpointNotFound, EndpointDeleting, EndpointAutoscaled, EndpointNoCapacity, NetworkFull]
)
async def scale(call: Call, endpoint: Ref, body: EndpointScale) -> ShownEndpoint:
    """Want another number of replicas; those that are too many drain first."""
    row = await call.load(Endpoint, endpoint)
    await service.scale(call.session, row, body.replicas)
    return await queries.show(call.session, row)


@noun.action("promote", EndpointView, errors=[EndpointNotFound, EndpointDeleting, EndpointNotRollingOut])
async def promote(call: Call, endpoint: Ref) -> ShownEndpoint:
    """End the watching of a roll-out: the other replicas follow."""
    row = await call.load(Endpoint, endpoint)
    await service.promote(call.session, row)
    return await queries.show(call.session, row)


@noun.action(
    "rollback", EndpointView, errors=[EndpointNotFound, EndpointDeleting, EndpointNoEarlierRevision, ModelNotAvailable]
)
async def rollback(call: Call, endpoint: Ref) -> ShownEndpoint:
    """Go back to the revision before: at once while a roll-out goes on, else by a roll-out of its own."""
    row = await call.load(Endpoint, endpoint)
    await service.roll_back(call.session, row)
    return await queries.show(call.session, row)


@noun.route("GET", "/{endpoint}/revisions", "revisions", RevisionList, errors=[EndpointNotFound])
async def revisions(call: Call, endpoint: Ref) -> RevisionList:
    """List what its replicas were made of, with why a revision was taken back."""
    row = await call.load(Endpoint, endpoint)
    found = await queries.revisions(call.session, row.id)
    return RevisionList(items=[RevisionView.model_validate(one) for one in found])


@noun.route("GET", "/{endpoint}/decisions", "decisions", DecisionList, errors=[EndpointNotFound])
async def decisions(call: Call, endpoint: Ref, *, limit: Limit = 100) -> DecisionList:
    """List what the autoscaler decided, with its reasons."""
    row = await call.load(Endpoint, endpoint)
    found = await queries.decisions(call.session, row.id, limit)
    return DecisionList(items=[DecisionView.model_validate(one) for one in found])


@noun.delete(EndpointView)
async def delete(call: Call, endpoint: Ref) -> ShownEndpoint:
    """Delete it: its routes end, its replicas drain and go."""
    row = await call.load(Endpoint, endpoint)
    answer = await queries.show(call.session, row)
    await service.remove(call.session, row)
    return answer
