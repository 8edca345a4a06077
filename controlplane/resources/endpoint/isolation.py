"""What a replica is, VM or container, and why. The one rule: nothing weaker or slower than what was asked for, and never
unsaid: a VM is emulated only when somebody asked for a VM by name and no host could do better.

It is decided once, when the endpoint is made, by what the fleet can do and not by what is free just now: a full host is no
reason for weaker isolation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, and_, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.json import JsonObject
from controlplane.models.image import Image
from controlplane.models.project import Project
from controlplane.placement.filters import suitability
from controlplane.placement.request import Isolation, PlacementRequest
from controlplane.resources.endpoint.errors import (
    EndpointContainersNotAllowed,
    EndpointGuestMissing,
    EndpointIsolationUnsupported,
    EndpointNotAccelerated,
)
from controlplane.resources.model.plan import Plan

Wanted = Literal["auto", "vm", "container"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`needs_kvm`: only hosts with usable KVM do. `guest_image_id`: what the VM boots."""

    isolation: Isolation
    reason: str
    needs_kvm: bool = False
    guest_image_id: str | None = None

    @property
    def spec(self) -> JsonObject:
        """What the endpoint keeps of it."""
        return {
            "isolation": self.isolation,
            "isolation_reason": self.reason,
            "needs_kvm": self.needs_kvm,
            "guest_image_id": self.guest_image_id,
        }


async def choose(session: AsyncSession, wanted: Wanted, plan: Plan, project: Project) -> Chosen:
    """Raises the errors of endpoints that say why it cannot be what was asked for."""
    can = plan.engine.isolations
    if wanted != "auto" and wanted not in can:
        detail = f"{plan.engine.name} runs in {', '.join(can)}, not in {wanted}"
        raise EndpointIsolationUnsupported(detail, errors=(FieldError(pointer="/isolation", detail=detail),))
    if wanted == "container" or "vm" not in can:
        _check_policy(project)
        asked = wanted == "container"
        return Chosen(isolation="container", reason="asked for" if asked else f"{plan.engine.name} runs in containers only")
    has_kvm = await _is_there_kvm(session)
    if wanted == "auto" and not has_kvm:
        return _without_kvm(plan, project)
    asked = "asked for" if wanted == "vm" else "a host has usable KVM"
    return Chosen(
        isolation="vm",
        reason=asked if has_kvm else "asked for; no host has usable KVM, so it is emulated",
        needs_kvm=has_kvm,
        guest_image_id=await _guest(session),
    )


def _without_kvm(plan: Plan, project: Project) -> Chosen:
    if "container" in plan.engine.isolations and project.allow_containers:
        return Chosen(isolation="container", reason="no host has usable KVM")
    barred = "the project does not allow containers" if "container" in plan.engine.isolations else "the engine runs in VMs only"
    raise EndpointNotAccelerated(f"no host has usable KVM, and {barred}; `isolation: vm` by name gives an emulated VM")


def _check_policy(project: Project) -> None:
    if not project.allow_containers:
        raise EndpointContainersNotAllowed(f"project {project.name} does not allow containers")


async def _is_there_kvm(session: AsyncSession) -> bool:
    """Whether any host that could take a machine of this kind has KVM that works, however full it is."""
    request = PlacementRequest(vcpus=1, memory_bytes=1, isolation="vm", needs_kvm=True)
    passes: ColumnElement[bool] = and_(*(item.passes for item in suitability(request)))
    return bool(await session.scalar(select(exists().where(passes))))


async def _guest(session: AsyncSession) -> str:
    """The newest guest image that runs workloads, kept from being removed until the endpoint stands."""
    query = (
        select(Image.id)
        .where(Image.state == "available", Image.runs_workloads, Image.architecture == "x86_64")
        .order_by(Image.created_at.desc(), Image.id.desc())
        .limit(1)
        .with_for_update(key_share=True, read=True)
    )
    found = await session.scalar(query)
    if found is None:
        raise EndpointGuestMissing("no available image says that it runs workloads: import the guest image first")
    return found
