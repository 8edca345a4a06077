"""Whole GPUs handed to machines, behind five words.

The one rule: a GPU is named by its PCI address (BDF, `0000:65:00.0`), and giving it back restores the driver it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTraits:
    name: Literal["vfio", "nvml", "fake"]
    hands_over: Literal["passthrough", "device_nodes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """`group_bdfs`: every function of its IOMMU group, which moves as one."""

    bdf: str
    group_bdfs: tuple[str, ...]
    uid: int
    gid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRendered:
    """Writes to sysfs in order: (path, text)."""

    writes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuObserved:
    bdf: str
    state: Literal["handed_over", "with_host"]
    driver: str
    device_nodes: tuple[str, ...] = ()


class GpuDriver(Protocol):
    traits: GpuTraits

    def render(self, plan: GpuPlan) -> GpuRendered: ...

    async def observe(self, bdf: str) -> GpuObserved | None:
        """None = no such device."""
        ...

    async def apply(self, plan: GpuPlan) -> GpuObserved: ...

    async def remove(self, bdf: str) -> None:
        """Give it back to the host's driver. Absent or given back already is success."""
        ...
