"""From a machine plan to what Cloud Hypervisor is told: its arguments, the VM's configuration, each nic. Pure.

The one rule: everything is said, nothing left to a default that differs between versions: the type of every image, shared
memory (vhost-user needs it), no console on a terminal.
Source: Cloud Hypervisor v53, vmm/src/api/openapi/cloud-hypervisor.yaml, docs/landlock.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.drivers.machine.protocol import DiskAttachment, MachinePlan, MountAttachment
from hostagent.drivers.machine.seed import mount_serial, root_serial
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import FirmwareBoot, KernelBoot, NicWanted

DISK = "disk-"
MAX_MOUNTS = 12  # beside disks, nics and the rest on the 32 slots of one segment


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a running machine has in its run directory."""

    directory: Path

    @property
    def api(self) -> Path:
        return self.directory / "api.sock"

    @property
    def events(self) -> Path:
        """A regular file: a reader that is slow loses nothing."""
        return self.directory / "events"

    @property
    def serial(self) -> Path:
        """The VMM's own socket, which one client may use: the console's relay."""
        return self.directory / "serial.sock"

    @property
    def console(self) -> Path:
        return self.directory / "console.sock"

    @property
    def seed(self) -> Path:
        return self.directory / "seed.img"

    @property
    def log(self) -> Path:
        """The VMM's own words, where it says why it ended."""
        return self.directory / "cloud-hypervisor.log"


def argv(program: Path, run_directory: Path) -> tuple[str, ...]:
    """`-v`: without it a guest's power-off and a signal from outside look the same."""
    files = RunFiles(directory=run_directory)
    monitor = f"path={files.events}"
    return (str(program), "--api-socket", f"path={files.api}", "--event-monitor", monitor, "--seccomp", "true", "-v")


def vm_config(plan: MachinePlan, *, has_landlock: bool) -> dict[str, Any]:
    """The body of `vm.create`. Raises AgentError `vm.unsupported` for what Cloud Hypervisor cannot do here."""
    files, vm = RunFiles(directory=plan.run_directory), plan.vm
    if not plan.is_kvm_usable:
        raise AgentError("vm.unsupported", "Cloud Hypervisor needs a host with usable KVM", retryable=False)
    if vm.workload is not None and plan.root is None:
        raise AgentError("vm.unsupported", "a workload in a VM needs an image with its root", retryable=False)
    disks = [disk_config(disk, vm.vcpus) for disk in plan.disks]
    if plan.seed or vm.workload is not None:
        disks.append(_shared("seed", files.seed))
    if plan.root is not None:
        disks.append(_mount(root_serial(), plan.root))
    disks += [_mount(mount_serial(index), mount) for index, mount in enumerate(plan.mounts)]
    config: dict[str, Any] = {
        "payload": _payload(plan),
        "cpus": _cpus(plan),
        "memory": {"size": vm.memory_bytes, "shared": True},
        "rng": {"src": "/dev/urandom"},
        "serial": {"mode": "Socket", "socket": str(files.serial)},
        "console": {"mode": "Off"},
        "pvpanic": True,
        "watchdog": True,
    }
    if disks:
        config["disks"] = disks
    if has_landlock:
        config |= {"landlock_enable": True, "landlock_rules": _landlock_rules(plan)}
    return config


def net_config(index: int, nic: NicWanted) -> dict[str, Any]:
    """The body of `vm.add-net`; the tap's one descriptor travels beside it. Two queues: one pair. No MTU: the VMM would
    set it on the tap, and has no right to; the seed tells the guest.
    """
    return {"id": f"nic{index}", "mac": nic.mac, "num_queues": 2}


def _payload(plan: MachinePlan) -> dict[str, str]:
    match plan.vm.boot:
        case KernelBoot() as boot:
            payload = {"kernel": str(plan.image_directory / boot.kernel_file), "cmdline": boot.cmdline}
            if boot.initramfs_file:
                payload["initramfs"] = str(plan.image_directory / boot.initramfs_file)
            return payload
        case FirmwareBoot() as boot:
            return {"firmware": str(plan.image_directory / boot.firmware_file)}
        case None:
            raise AgentError("vm.unsupported", "Cloud Hypervisor needs a kernel or a firmware to boot", retryable=False)


def _cpus(plan: MachinePlan) -> dict[str, Any]:
    """The product of the topology must be `max_vcpus`. With enough CPUs each vCPU gets one of its own."""
    count = plan.vm.vcpus
    topology = {"threads_per_core": 1, "cores_per_die": count, "dies_per_package": 1, "packages": 1}
    cpus: dict[str, Any] = {"boot_vcpus": count, "max_vcpus": count, "topology": topology}
    if plan.cpus:
        is_own = len(plan.cpus) >= count
        cpus["affinity"] = [
            {"vcpu": index, "host_cpus": [plan.cpus[index]] if is_own else list(plan.cpus)} for index in range(count)
        ]
    return cpus


def disk_id(volume_id: str) -> str:
    return f"{DISK}{volume_id}"


def disk_config(disk: DiskAttachment, vcpus: int) -> dict[str, Any]:
    """More queues than vCPUs are refused at boot; so are limits of rate on a vhost-user disk (they are the daemon's)."""
    if disk.transport != "vhost_user_blk":
        raise AgentError("vm.unsupported", f"disk {disk.volume_id} is no vhost-user socket", retryable=False)
    return {
        "id": disk_id(disk.volume_id),
        "vhost_user": True,
        "vhost_socket": str(disk.path),
        "num_queues": min(disk.num_queues, vcpus),
        "queue_size": disk.queue_size,
    }


def _mount(serial: str, mount: MountAttachment) -> dict[str, Any]:
    if mount.form != "disk":
        raise AgentError("vm.unsupported", f"{mount.source} is no disk that a VM can be given", retryable=False)
    return _shared(serial, mount.source)


def _shared(name: str, path: Path) -> dict[str, Any]:
    """Only read, by any number of machines. The type is said: a guest could else turn a raw image into one with a backing
    file on the host.
    """
    return {"id": f"{name}_disk", "path": str(path), "readonly": True, "serial": name, "image_type": "Raw"}


def _landlock_rules(plan: MachinePlan) -> list[dict[str, str]]:
    """What the VMM's own rules leave out: the sockets that it makes."""
    return [{"path": str(plan.run_directory), "access": "rw"}]
