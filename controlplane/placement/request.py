"""What is asked of a host. The one rule: plain data; the same request always gives the same statement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MIB = 1 << 20

Isolation = Literal["vm", "container"]

DRIVERS: Mapping[Isolation, tuple[str, ...]] = {
    "vm": ("cloud_hypervisor", "qemu", "fake"),
    "container": ("container", "fake"),
}
"""Drivers that give an isolation class, best first. Only test hosts report `fake`."""

OVERHEAD_BYTES: Mapping[str, int] = {"cloud_hypervisor": 64 * MIB, "qemu": 128 * MIB, "container": 16 * MIB, "fake": 0}
"""Memory that a driver's own processes (VMM, storage daemon) need beside the guest's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """`labels` must all be on the host with these values; empty `location` and `host` mean any. `needs_kvm`: a host that
    would emulate the processor does not do. `disks`: bytes of new disks by the name of the storage pool.
    """

    vcpus: int
    memory_bytes: int
    isolation: Isolation = "vm"
    architecture: str = "x86_64"
    labels: Mapping[str, str] = field(default_factory=dict)
    location: str = ""
    host: str = ""
    role: str = "compute"
    needs_kvm: bool = False
    needs_tunnel: bool = False
    disks: Mapping[str, int] = field(default_factory=dict)

    @property
    def drivers(self) -> tuple[str, ...]:
        return DRIVERS[self.isolation]

    @property
    def overhead_bytes(self) -> int:
        """The most that any driver of the class needs: what is checked fits whichever driver is taken."""
        return max(OVERHEAD_BYTES[driver] for driver in self.drivers)

    @property
    def reserved_memory_bytes(self) -> int:
        return self.memory_bytes + self.overhead_bytes
