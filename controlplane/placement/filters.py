"""The reasons why a host may not be taken, each an SQL expression over the host row with a name and a sentence.

The one rule: a filter never looks at another table; `reserve` relies on it, because only the locked row is read again
after a concurrent change. `disk` does, and so is only a look.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, and_, false, func, literal, or_, select, true
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import Text

from controlplane.models.host import Host
from controlplane.models.storage_pool import ROOM, StoragePool
from controlplane.placement.request import PlacementRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """`passes` is true where the host may be taken; `measure`, where there is one, is what it has free."""

    name: str
    passes: ColumnElement[bool]
    reason: str
    needed: int | None = None
    measure: ColumnElement[int] | None = None


FREE_VCPUS: ColumnElement[int] = Host.allocatable_vcpus - Host.reserved_vcpus
FREE_MEMORY_BYTES: ColumnElement[int] = Host.allocatable_memory_bytes - Host.reserved_memory_bytes
KVM_USABLE: ColumnElement[bool] = func.coalesce(Host.facts["kvm"]["usable"].as_boolean(), false())


def suitability(request: PlacementRequest) -> tuple[Filter, ...]:
    """What a host is or is not, whatever runs on it."""
    return (*_place(request), *_abilities(request))


def _place(request: PlacementRequest) -> tuple[Filter, ...]:
    return (
        Filter(
            name="ready",
            passes=and_(Host.state == "ready", Host.is_cordoned.is_(False), Host.link != "lost"),
            reason="not ready, drained, or out of reach",
        ),
        Filter(name="role", passes=Host.roles.contains([request.role]), reason=f"without role {request.role}"),
        Filter(
            name="host",
            passes=Host.id == request.host if request.host else true(),
            reason="not the host that was asked for",
        ),
        Filter(
            name="location",
            passes=Host.location == request.location if request.location else true(),
            reason=f"not at location {request.location}",
        ),
        Filter(
            name="labels",
            passes=Host.labels.contains(dict(request.labels)) if request.labels else true(),
            reason="without the labels " + ", ".join(f"{key}={value}" for key, value in sorted(request.labels.items())),
        ),
    )


def _abilities(request: PlacementRequest) -> tuple[Filter, ...]:
    return (
        Filter(
            name="architecture",
            passes=Host.architecture == request.architecture,
            reason=f"of another architecture than {request.architecture}",
        ),
        Filter(
            name="tunnel",
            passes=Host.tunnel_driver != "" if request.needs_tunnel else true(),
            reason="without WireGuard, which the network needs",
        ),
        Filter(
            name="driver",
            passes=Host.machine_drivers.bool_op("&&")(literal(list(request.drivers), ARRAY(Text))),
            reason=f"without a driver for isolation {request.isolation}",
        ),
        Filter(
            name="kvm",
            passes=KVM_USABLE if request.needs_kvm else true(),
            reason="without usable KVM",
        ),
    )


def capacity(request: PlacementRequest) -> tuple[Filter, ...]:
    """What a host has left."""
    return (
        Filter(
            name="vcpus",
            passes=request.vcpus <= FREE_VCPUS,
            reason=f"without {request.vcpus} free core{'' if request.vcpus == 1 else 's'}",
            needed=request.vcpus,
            measure=FREE_VCPUS,
        ),
        Filter(
            name="memory",
            passes=request.reserved_memory_bytes <= FREE_MEMORY_BYTES,
            reason=f"without {request.reserved_memory_bytes} bytes of free memory",
            needed=request.reserved_memory_bytes,
            measure=FREE_MEMORY_BYTES,
        ),
        *(_disk(pool, size_bytes) for pool, size_bytes in sorted(request.disks.items())),
    )


def _disk(pool: str, size_bytes: int) -> Filter:
    """A look only: the room is taken by one statement on the pool's row, after the host is chosen. A host that has not told of
    its pools yet is not held back.
    """
    here = StoragePool.host_id == Host.id, StoragePool.name == pool, StoragePool.is_available
    free = select(ROOM).where(*here).scalar_subquery()
    is_silent = ~select(StoragePool.id).where(StoragePool.host_id == Host.id).exists()
    return Filter(
        name="disk",
        passes=or_(func.coalesce(size_bytes <= free, false()), is_silent),
        reason=f"without {size_bytes} bytes of room in storage pool {pool}",
        needed=size_bytes,
        measure=func.coalesce(free, 0),
    )


def all_pass(request: PlacementRequest) -> ColumnElement[bool]:
    return and_(*(item.passes for item in (*suitability(request), *capacity(request))))
