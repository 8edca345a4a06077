"""What a volume's row, machine, host and run say together. The one rule: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controlplane.models.host import Host
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.snapshot.queries import Said, ready


def is_settled(volume: Volume, vm: Vm | None) -> bool:
    """The host has carried out the last change, and so has the machine that has the volume, or had it."""
    is_told = vm is None or vm.host_id is None or vm.observed_generation >= vm.generation
    return volume.observed_generation >= volume.generation and not volume.is_detaching and is_told


def has_disk(volume_id: str, state: str, detail: Mapping[str, Any]) -> bool:
    """Whether the machine's process still has a disk that was taken out of its document."""
    if state != "running":
        return False
    if "disks" in detail:
        return volume_id in str(detail["disks"]).split(",")
    return bool(detail.get("restart_needed"))


def status_of(volume: Volume, host: Host | None, run: Run | None) -> str:
    """One word for lists."""
    if volume.state in ("retained", "deleting"):
        return volume.state
    if run is not None and run.parked_at is not None:
        return "failed"
    if volume.state == "creating":
        return "creating"
    if host is not None and host.link == "lost":
        return "unreachable"
    if volume.observed_state in ("locked", "failed"):
        return volume.observed_state
    if volume.vm_id is None:
        return "available"
    return "detaching" if volume.is_detaching else "attached"


def conditions_of(volume: Volume, vm: Vm | None, host: Host | None, run: Run | None) -> list[Said]:
    """Ready; Locked, GrowPending and AttachPending while they hold."""
    found = [ready(volume.observed_generation >= volume.generation and volume.state != "creating", run)]
    if volume.observed_state == "locked":
        words = "Its key is not on the host: the control plane sends it as soon as it reaches the host."
        found.append(Said(type="Locked", status="true", reason="volume.locked", message=words, since=volume.observed_at))
    if host is not None and host.link == "lost":
        words = f"Host {host.name} does not answer; what runs there goes on, but nothing can be changed."
        found.append(
            Said(type="HostReachable", status="false", reason="host.unreachable", message=words, since=host.link_changed_at)
        )
    if volume.takes_effect == "after_reboot":
        words = f"The machine sees {volume.observed_size_bytes} bytes after its next restart."
        found.append(Said(type="GrowPending", status="true", reason="after_reboot", message=words))
    if vm is not None and (pending := _pending(volume, vm)) is not None:
        found.append(pending)
    return found


def _pending(volume: Volume, vm: Vm) -> Said | None:
    """What the machine has not done yet of what was asked of it."""
    detail = vm.observed_detail
    kind = "DetachPending" if volume.is_detaching else "AttachPending"
    if volume.is_detaching and volume.id in str(detail.get("detaching") or "").split(","):
        words = f"The guest of {vm.name} has not let it go: unmount it there, or stop {vm.name}."
        return Said(type=kind, status="true", reason="in_use_by_guest", message=words)
    if not detail.get("restart_needed") or (
        "disks" in detail and volume.id in str(detail["disks"]).split(",") and not volume.is_detaching
    ):
        return None
    words = f"{vm.name} {'lets it go' if volume.is_detaching else 'gets it'} at its next restart."
    return Said(type=kind, status="true", reason="after_reboot", message=words)
