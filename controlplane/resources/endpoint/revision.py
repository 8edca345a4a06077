"""What an endpoint's replicas are made of, and the beginning and end of a change of it.

The one rule: the endpoint's own columns and its `revision` change together, and only here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.json import JsonObject
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import EndpointRevision, RevisionTraffic
from controlplane.models.image import Image
from controlplane.models.model import Model
from controlplane.models.project import Project
from controlplane.resources.endpoint.errors import (
    EndpointMemoryTooSmall,
    EndpointNoEarlierRevision,
    EndpointNotRollingOut,
    EndpointRollingOut,
)
from controlplane.resources.endpoint.isolation import Wanted, choose
from controlplane.resources.endpoint.rollout import Rollout, Strategy
from controlplane.resources.endpoint.schemas import EndpointUpdate
from controlplane.resources.model.errors import ModelNotAvailable
from controlplane.resources.model.plan import Plan, plan_of

KEPT = 10


class Shape(Protocol):
    """What a request says of it; None: the model's own."""

    @property
    def model(self) -> str | None: ...
    @property
    def vcpus(self) -> int | None: ...
    @property
    def memory_bytes(self) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    model: str
    spec: JsonObject
    vcpus: int
    memory_bytes: int


async def template(session: AsyncSession, project: Project, isolation: Wanted, wanted: Shape) -> Template:
    """Of the catalogue's entry as it is now; raises the errors that say why it cannot be served so."""
    model = await _model(session, wanted.model or "")
    plan = plan_of(model.spec)
    chosen = await choose(session, isolation, plan, project)
    images: JsonObject = {"weights_image_id": model.weights_image_id, "engine_image_id": model.engine_image_id}
    return Template(
        model=model.name,
        spec={**model.spec, **images, **chosen.spec},
        vcpus=wanted.vcpus or plan.model.shape.vcpus,
        memory_bytes=_memory_bytes(wanted.memory_bytes, plan, chosen.isolation),
    )


async def record(session: AsyncSession, endpoint: Endpoint) -> None:
    """Keep what the endpoint says now as its revision of this number."""
    row = EndpointRevision(
        endpoint_id=endpoint.id,
        number=endpoint.revision,
        model=endpoint.model,
        spec=endpoint.spec,
        vcpus=endpoint.vcpus,
        memory_bytes=endpoint.memory_bytes,
    )
    session.add(row)
    await session.flush()


async def change(session: AsyncSession, endpoint: Endpoint, changes: EndpointUpdate) -> bool:
    """Begin to roll out what `changes` say; False when nothing is other than it is. Raises EndpointRollingOut."""
    given = changes.model_dump(exclude_unset=True, include={"vcpus", "memory_bytes"})
    is_other_model = changes.model is not None and changes.model != endpoint.model
    kept = {} if is_other_model else {"vcpus": endpoint.vcpus, "memory_bytes": endpoint.memory_bytes}
    wanted = EndpointUpdate.model_validate({"model": changes.model or endpoint.model, **kept, **given})
    project = await session.get_one(Project, endpoint.project_id)
    made = await template(session, project, cast("Wanted", endpoint.isolation), wanted)
    if made == Template(model=endpoint.model, spec=endpoint.spec, vcpus=endpoint.vcpus, memory_bytes=endpoint.memory_bytes):
        return False
    if endpoint.rollout is not None:
        raise EndpointRollingOut(f"revision {endpoint.revision} is being rolled out; promote it, roll it back or wait")
    before = endpoint.revision
    latest = select(func.max(EndpointRevision.number)).where(EndpointRevision.endpoint_id == endpoint.id)
    _become(endpoint, made, (await session.scalar(latest) or before) + 1)
    await record(session, endpoint)
    chosen = changes.rollout
    await _begin(session, endpoint, before, Strategy() if chosen is None else Strategy(**chosen.model_dump()))
    return True


async def promote(session: AsyncSession, endpoint: Endpoint) -> None:
    """Raises EndpointNotRollingOut."""
    if endpoint.rollout is None:
        raise EndpointNotRollingOut(f"no roll-out of {endpoint.name} goes on")
    rollout = stored(endpoint)
    if rollout.promoted_at is None:
        endpoint.rollout = asdict(replace(rollout, promoted_at=await _now(session)))


async def roll_back(session: AsyncSession, endpoint: Endpoint) -> None:
    """Raises EndpointNoEarlierRevision."""
    if endpoint.rollout is not None:
        if not stored(endpoint).is_back:
            await go_back(session, endpoint, "asked for")
        return
    earlier = (
        select(EndpointRevision)
        .where(EndpointRevision.endpoint_id == endpoint.id, EndpointRevision.number < endpoint.revision)
        .where(EndpointRevision.failure == "")
        .order_by(EndpointRevision.number.desc())
        .limit(1)
    )
    found = await session.scalar(earlier)
    if found is None:
        raise EndpointNoEarlierRevision(f"{endpoint.name} has no revision before {endpoint.revision}")
    before = endpoint.revision
    await _mark(session, endpoint, "rolled back: asked for")
    await _check_images(session, found)
    _become(endpoint, _of(found), found.number)
    await _begin(session, endpoint, before, Strategy(watch_seconds=0, ramp_seconds=0))  # it is known to have served


async def go_back(session: AsyncSession, endpoint: Endpoint, reason: str) -> None:
    """What was there before is wanted again; the revision that failed keeps why."""
    rollout = stored(endpoint)
    before = await session.get_one(EndpointRevision, (endpoint.id, rollout.from_revision))
    failed = endpoint.revision
    await _mark(session, endpoint, reason)
    _become(endpoint, _of(before), before.number)
    promoted_at = rollout.promoted_at or rollout.began_at
    back = replace(rollout, from_revision=failed, is_back=True, share=None, promoted_at=promoted_at)
    endpoint.rollout = asdict(back)


async def finish(session: AsyncSession, endpoint: Endpoint) -> None:
    """The roll-out is over: all replicas are of the present revision."""
    endpoint.rollout = None
    await session.execute(delete(RevisionTraffic).where(RevisionTraffic.endpoint_id == endpoint.id))
    old = (
        select(EndpointRevision.number)
        .where(EndpointRevision.endpoint_id == endpoint.id, EndpointRevision.number != endpoint.revision)
        .order_by(EndpointRevision.number.desc())
        .offset(KEPT)
    )
    numbers = list(await session.scalars(old))
    mine = EndpointRevision.endpoint_id == endpoint.id
    await session.execute(delete(EndpointRevision).where(mine, EndpointRevision.number.in_(numbers)))


def stored(endpoint: Endpoint) -> Rollout:
    """The roll-out that goes on."""
    document: Any = endpoint.rollout or {}
    return Rollout(**{**document, "strategy": Strategy(**document["strategy"])})


def store(endpoint: Endpoint, rollout: Rollout) -> bool:
    """Whether that is news to gateways: another share."""
    before, document = endpoint.rollout or {}, asdict(rollout)
    endpoint.rollout = document
    return before.get("share") != document["share"] or before.get("is_back") != document["is_back"]


async def _begin(session: AsyncSession, endpoint: Endpoint, before: int, strategy: Strategy) -> None:
    await session.execute(delete(RevisionTraffic).where(RevisionTraffic.endpoint_id == endpoint.id))
    endpoint.rollout = asdict(Rollout(from_revision=before, strategy=strategy, began_at=await _now(session)))


async def _now(session: AsyncSession) -> float:
    return float(await session.scalar(select(func.extract("epoch", func.now()))) or 0)


async def _mark(session: AsyncSession, endpoint: Endpoint, reason: str) -> None:
    row = await session.get_one(EndpointRevision, (endpoint.id, endpoint.revision))
    row.failure = reason


def _become(endpoint: Endpoint, made: Template, number: int) -> None:
    endpoint.model, endpoint.spec, endpoint.revision = made.model, made.spec, number
    endpoint.vcpus, endpoint.memory_bytes = made.vcpus, made.memory_bytes


def _of(row: EndpointRevision) -> Template:
    return Template(model=row.model, spec=row.spec, vcpus=row.vcpus, memory_bytes=row.memory_bytes)


async def _check_images(session: AsyncSession, row: EndpointRevision) -> None:
    """Raises ModelNotAvailable when what it was made of has been removed since."""
    wanted = {str(row.spec[name]) for name in ("weights_image_id", "engine_image_id", "guest_image_id") if row.spec.get(name)}
    there = set(await session.scalars(select(Image.id).where(Image.id.in_(wanted), Image.state == "available")))
    if wanted - there:
        detail = f"images of revision {row.number} were removed since: {', '.join(sorted(wanted - there))}"
        raise ModelNotAvailable(detail, model=row.model)


async def _model(session: AsyncSession, name: str) -> Model:
    model = await session.scalar(select(Model).where(Model.name == name))
    if model is None or model.state != "available":
        raise ModelNotAvailable(f"{name} was not imported yet: bedplate model import {name}", model=name)
    return model


def _memory_bytes(asked: int | None, plan: Plan, isolation: str) -> int:
    if asked is None:
        return plan.memory_bytes(isolation)
    parts = plan.memory(isolation)
    least = sum(part.bytes for part in parts)
    if asked < least:
        detail = f"a replica needs {least} bytes: {', '.join(f'{part.reason} {part.bytes}' for part in parts)}"
        raise EndpointMemoryTooSmall(detail, errors=(FieldError(pointer="/memory_bytes", detail=detail),))
    return asked
