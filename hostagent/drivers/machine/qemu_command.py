"""From a machine plan to QEMU's command line and to the QMP words that give it its nics. Pure.

The one rule: everything a guest can reach is named here and nothing by default (`-nodefaults -no-user-config`); every device
sits behind a PCIe root port of its own, so slots do not move when one is added or left out.
Source: QEMU 7.2, qemu-system-x86_64(1) and docs/system/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.drivers.machine.protocol import DiskAttachment, MachinePlan, MountAttachment
from hostagent.drivers.machine.seed import mount_serial, root_serial
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import FirmwareBoot, KernelBoot, NicWanted

DISK, PORT_SPARE = "disk-", "port_spare"
SPARE_PORTS = 8  # functions of one slot
PROGRAM = "/usr/bin/qemu-system-x86_64"
MAX_MOUNTS = 12  # each takes one of the 31 slots of the root complex, beside disks, nics and the rest
# An engine that finds AVX takes it, and TCG emulates it by calls, fused multiplication even without the host's arithmetic:
# sixteen times slower than the same engine with SSE (measured with ONNX Runtime 1.32 on QEMU 7.2).
WITHOUT_VECTORS = "max,-avx,-avx2,-fma,-f16c"
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """What a running machine has in its run directory."""

    directory: Path

    @property
    def qmp(self) -> Path:
        return self.directory / "qmp.sock"

    @property
    def console(self) -> Path:
        return self.directory / "console.sock"

    @property
    def seed(self) -> Path:
        return self.directory / "seed.img"

    @property
    def log(self) -> Path:
        """QEMU's own words, where it says by which signal it was ended."""
        return self.directory / "qemu.log"


def qemu_argv(plan: MachinePlan, *, tsc_khz: int) -> tuple[str, ...]:
    """Raises AgentError `vm.unsupported` for what QEMU cannot do here."""
    files = RunFiles(directory=plan.run_directory)
    vm = plan.vm
    if vm.workload is not None and plan.root is None:
        raise AgentError("vm.unsupported", "a workload in a VM needs an image with its root", retryable=False)
    emulated = "max" if vm.workload is None else WITHOUT_VECTORS
    accelerator = ("kvm", "host,host-phys-bits=on") if plan.is_kvm_usable else ("tcg", emulated)
    argv = [PROGRAM, "-name", f"guest={vm.id},debug-threads=on", "-nodefaults", "-no-user-config", "-display", "none", "-S"]
    argv += ["-machine", f"q35,accel={accelerator[0]},memory-backend=memory", "-cpu", accelerator[1]]
    argv += ["-smp", f"{vm.vcpus},sockets=1,cores={vm.vcpus},threads=1"]
    argv += ["-object", f"memory-backend-memfd,id=memory,size={vm.memory_bytes},share=on", "-m", f"{vm.memory_bytes}B"]
    argv += _boot(plan, tsc_khz)
    argv += _spare_ports()
    for index, disk in enumerate(plan.disks):
        argv += _disk(index, disk, is_bootable=isinstance(vm.boot, FirmwareBoot))
    for index in range(len(plan.nics)):
        argv += _root_port(f"port_nic{index}", 64 + index)
    if plan.seed or vm.workload is not None:
        argv += _shared("seed", files.seed, 128)
    if plan.root is not None:
        argv += _mount(root_serial(), plan.root, 129)
    for index, mount in enumerate(plan.mounts):
        argv += _mount(mount_serial(index), mount, 130 + index)
    argv += ["-object", "rng-random,id=random,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=random"]
    argv += ["-device", "pvpanic-pci", "-device", "i6300esb", "-action", "panic=exit-failure,watchdog=reset"]
    argv += ["-chardev", f"socket,id=qmp,path={files.qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    serial = f"socket,id=serial,path={files.console},server=on,wait=off,logfile={plan.log_path},logappend=on"
    argv += ["-chardev", serial, "-serial", "chardev:serial", "-sandbox", SANDBOX]
    return tuple(argv)


def nic_words(index: int, nic: NicWanted, descriptor_name: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The QMP commands that plug a nic whose tap's descriptor was sent under this name; before `cont`."""
    netdev = {"type": "tap", "id": f"net{index}", "fd": descriptor_name}
    device = {
        "driver": "virtio-net-pci",
        "id": f"nic{index}",
        "netdev": f"net{index}",
        "mac": nic.mac,
        "bus": f"port_nic{index}",
        "romfile": "",
    }
    return (("netdev_add", netdev), ("device_add", device))


def _boot(plan: MachinePlan, tsc_khz: int) -> list[str]:
    match plan.vm.boot:
        case KernelBoot() as boot:
            kernel, initramfs = plan.image_directory / boot.kernel_file, plan.image_directory / boot.initramfs_file
            # without the early frequency the kernel measures it against a timer that a busy host delays, and gives up
            cmdline = f"{boot.cmdline} tsc_early_khz={tsc_khz}".strip()
            return ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", cmdline]
        case FirmwareBoot() as boot:
            return ["-bios", str(plan.image_directory / boot.firmware_file)]
        case None:
            raise AgentError("vm.unsupported", "the qemu driver needs a kernel or a firmware to boot", retryable=False)


def _root_port(name: str, chassis: int) -> list[str]:
    return ["-device", f"pcie-root-port,id={name},chassis={chassis},slot={chassis}"]


def _disk(index: int, disk: DiskAttachment, *, is_bootable: bool) -> list[str]:
    """`reconnect` keeps the guest alive while the storage daemon is restarted; without it the disk is dead. With a kernel of
    its own the machine has no boot order (`-kernel` takes index 0). `config-wce=off`: the export offers CONFIG_WCE with the
    value 0, a guest then believes in a write-through disk, never flushes, and a killed daemon loses its writes.
    """
    if disk.transport != "vhost_user_blk":
        raise AgentError("vm.unsupported", f"disk {disk.volume_id} is no vhost-user socket", retryable=False)
    device = f"vhost-user-blk-pci,id={disk_id(disk.volume_id)},bus=port_disk{index},chardev={socket_id(disk.volume_id)}"
    device += f",num-queues={disk.num_queues},queue-size={disk.queue_size},config-wce=off"
    if disk.is_boot and is_bootable:
        device += ",bootindex=0"
    chardev = f"socket,id={socket_id(disk.volume_id)},path={disk.path},reconnect=1"
    return ["-chardev", chardev, *_root_port(f"port_disk{index}", 1 + index), "-device", device]


def disk_id(volume_id: str) -> str:
    return f"{DISK}{volume_id}"


def socket_id(volume_id: str) -> str:
    return f"socket-{volume_id}"


def plug_words(disk: DiskAttachment, port: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """The QMP commands that give a running machine the disk, as `_disk` does at its start."""
    address = {"type": "unix", "data": {"path": str(disk.path)}}
    backend = {"type": "socket", "data": {"addr": address, "server": False, "reconnect": 1}}
    device = {
        "driver": "vhost-user-blk-pci",
        "id": disk_id(disk.volume_id),
        "bus": port,
        "chardev": socket_id(disk.volume_id),
        "num-queues": disk.num_queues,
        "queue-size": disk.queue_size,
        "config-wce": False,
    }
    return (("chardev-add", {"id": socket_id(disk.volume_id), "backend": backend}), ("device_add", device))


def _spare_ports() -> list[str]:
    """For disks that come later; the functions of one slot."""
    words: list[str] = []
    for index in range(SPARE_PORTS):
        port = f"pcie-root-port,id={PORT_SPARE}{index},chassis={200 + index},slot={200 + index},addr=0x1e.{index}"
        words += ["-device", f"{port},multifunction=on"]
    return words


def _mount(serial: str, mount: MountAttachment, chassis: int) -> list[str]:
    if mount.form != "disk":
        raise AgentError("vm.unsupported", f"{mount.source} is no disk that a VM can be given", retryable=False)
    return _shared(serial, mount.source, chassis)


def _shared(name: str, path: Path, chassis: int) -> list[str]:
    """A file that is only read, opened by QEMU itself: any number of machines may read the same one. The guest finds it by
    its serial.
    """
    file = {"driver": "file", "node-name": f"{name}_file", "filename": str(path), "read-only": True}
    node = {"driver": "raw", "node-name": name, "file": f"{name}_file", "read-only": True}
    device = f"virtio-blk-pci,id={name}_disk,bus=port_{name},drive={name},serial={name}"
    words = ["-blockdev", json.dumps(file), "-blockdev", json.dumps(node)]
    return [*words, *_root_port(f"port_{name}", chassis), "-device", device]
