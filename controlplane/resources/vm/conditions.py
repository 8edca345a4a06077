"""What a VM's row, host and run say together: its one-word status and its conditions. The one rule: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from controlplane.models.host import Host
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume

Status = Literal["waiting", "preparing", "running", "stopping", "stopped", "failed", "unreachable", "deleting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: Literal["true", "false", "unknown"]
    reason: str = ""
    message: str = ""
    since: datetime | None = None


def is_settled(vm: Vm) -> bool:
    """The host has carried out the last change and the machine is in the wanted power state."""
    return vm.observed_generation >= vm.generation and vm.observed_power == vm.power


def status_of(vm: Vm, host: Host | None, run: Run | None) -> Status:
    """One word for lists."""
    if vm.state == "deleting":
        return "deleting"
    if run is not None and run.parked_at is not None:
        return "failed"
    if vm.state == "waiting":
        return "waiting"
    if host is not None and host.link == "lost":
        return "unreachable"
    if vm.observed_power == "failed":
        return "failed"
    if vm.power == "running":
        return "running" if vm.observed_power == "running" and is_settled(vm) else "preparing"
    return "stopped" if vm.observed_power == "stopped" else "stopping" if vm.observed_power == "running" else "preparing"


def conditions_of(vm: Vm, host: Host | None, run: Run | None, volumes: Sequence[Volume] = ()) -> list[Said]:
    """Placed, HostReachable, Ready; VolumesLocked while a disk waits for its key, ResizePending while a resize waits for a
    restart.
    """
    found = [_placed(vm)]
    if host is not None:
        found.append(_host_reachable(host))
    found.append(_ready(vm, run))
    locked = [volume for volume in volumes if volume.observed_state == "locked"]
    if locked:
        names = ", ".join(volume.name for volume in locked)
        message = f"It waits for {names}: the control plane sends the key as soon as it reaches the host."
        found.append(
            Said(type="VolumesLocked", status="true", reason="volume.locked", message=message, since=locked[0].observed_at)
        )
    if (reset := _reset(vm)) is not None:
        found.append(reset)
    if (vm.vcpus, vm.memory_bytes) != (vm.applied_vcpus, vm.applied_memory_bytes):
        message = f"{vm.vcpus} cores and {vm.memory_bytes} bytes of memory apply at the next restart or start."
        found.append(Said(type="ResizePending", status="true", reason="after_reboot", message=message))
    return found


def _reset(vm: Vm) -> Said | None:
    """Until its next start. A storage daemon that dies loses what was in flight, and a guest would wait for that for ever."""
    if vm.observed_detail.get("reset_due"):
        message = "The storage daemon of one of its disks died with requests in flight: it is being reset."
        return Said(type="DiskInterrupted", status="true", reason="vm.reset_due", message=message)
    stamp = vm.observed_detail.get("reset_unix_ms")
    when = datetime.fromtimestamp(stamp / 1000, UTC) if isinstance(stamp, int) else None
    if when is None or vm.started_at is None or when <= vm.started_at:
        return None
    message = "The storage daemon of one of its disks died with requests in flight, so it was reset. What was flushed is there."
    return Said(type="DiskInterrupted", status="true", reason="vm.was_reset", message=message, since=when)


def _placed(vm: Vm) -> Said:
    if vm.host_id is not None:
        return Said(type="Placed", status="true")
    shortage = vm.shortage or {}
    message = str(shortage.get("detail", "It waits for a host."))
    return Said(type="Placed", status="false", reason="vm.no_capacity", message=message)


def _host_reachable(host: Host) -> Said:
    if host.link == "lost":
        message = f"Host {host.name} does not answer; what runs there goes on, but nothing can be changed."
        return Said(
            type="HostReachable", status="false", reason="host.unreachable", message=message, since=host.link_changed_at
        )
    status = "true" if host.link == "up" else "unknown"
    return Said(type="HostReachable", status=status, since=host.link_changed_at)


def _ready(vm: Vm, run: Run | None) -> Said:
    if run is not None and run.parked_at is not None:
        return Said(
            type="Ready",
            status="false",
            reason=run.parked_code or "run.parked",
            message=run.parked_detail or "",
            since=run.parked_at,
        )
    if is_settled(vm):
        return Said(type="Ready", status="true", since=vm.observed_at)
    if run is not None and run.last_error:
        return Said(type="Ready", status="false", reason="vm.retrying", message=run.last_error)
    if vm.observed_generation >= vm.generation:
        reason = f"vm.{vm.observed_power}"
        message = str(vm.observed_detail.get("reason") or f"It is {vm.observed_power}, wanted is {vm.power}.")
        return Said(type="Ready", status="false", reason=reason, message=message, since=vm.observed_at)
    return Said(type="Ready", status="false", reason="vm.in_progress", message="The last change is being carried out.")
