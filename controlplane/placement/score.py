"""Which of the hosts that fit is best. The one rule: smaller is better, and equal hosts part by the subject's hash."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Float, func

from controlplane.models.host import Host
from controlplane.placement.request import PlacementRequest


def fullness(request: PlacementRequest) -> ColumnElement[float]:
    """The fuller of cores and memory, 0 to 1, as it would be with the machine there: machines spread over the fleet."""
    cpus = (Host.reserved_vcpus + request.vcpus).cast(Float) / func.greatest(Host.allocatable_vcpus, 1)
    memory = (Host.reserved_memory_bytes + request.reserved_memory_bytes).cast(Float) / func.greatest(
        Host.allocatable_memory_bytes, 1
    )
    return func.greatest(cpus, memory)


def order(request: PlacementRequest, subject_id: str) -> tuple[ColumnElement[float], ColumnElement[str]]:
    return fullness(request), func.md5(func.concat(Host.id, subject_id))
