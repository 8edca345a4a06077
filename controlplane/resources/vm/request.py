"""From a VM's row to what is asked of a host. The one rule: the row alone decides, so a later try asks the same."""

from __future__ import annotations

from controlplane.models.vm import Vm
from controlplane.placement.request import PlacementRequest


def request_for(vm: Vm, architecture: str, *, vcpus: int | None = None, memory_bytes: int | None = None) -> PlacementRequest:
    labels, disks = vm.placement.get("labels"), vm.placement.get("disks")
    return PlacementRequest(
        vcpus=vcpus or vm.vcpus,
        memory_bytes=memory_bytes or vm.memory_bytes,
        isolation="container" if vm.isolation == "container" else "vm",
        architecture=architecture,
        labels={key: str(value) for key, value in labels.items()} if isinstance(labels, dict) else {},
        location=str(vm.placement.get("location") or ""),
        disks={pool: int(str(size)) for pool, size in disks.items()} if isinstance(disks, dict) and vm.host_id is None else {},
        host=str(vm.placement.get("host") or ""),
        needs_kvm=bool(vm.placement.get("needs_kvm")),
        needs_tunnel=bool(vm.placement.get("needs_tunnel")),
    )
