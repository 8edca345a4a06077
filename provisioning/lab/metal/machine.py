"""From an emulated server to QEMU's command line. Pure.

The one rule: it looks like a server. Firmware tables, an IOMMU with interrupt remapping, every PCI device behind a root port
of its own (so each is alone in its IOMMU group), a processor with virtualisation; all emulated, as KVM may not be usable here.
Source: QEMU 7.2, docs/system/, hw/i386/intel_iommu.c; Linux, Documentation/admin-guide/kernel-parameters.txt.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAM = "/usr/bin/qemu-system-x86_64"
ACCELERATORS = ("edu", "pci-testdev", "nvme", "e1000e")  # what plays a GPU: no stock device carries a real one's ids
FIRST_CHASSIS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalSpec:
    """`devices`: emulated PCI functions that the server may give to guests."""

    name: str
    cores: int = 2
    memory_bytes: int = 3 << 30
    devices: tuple[str, ...] = ACCELERATORS


@dataclass(frozen=True, slots=True, kw_only=True)
class MetalFiles:
    """What a server has in its directory on this machine."""

    directory: Path

    @property
    def disk(self) -> Path:
        return self.directory / "disk.raw"

    @property
    def accelerator_disk(self) -> Path:
        return self.directory / "accelerator.raw"

    @property
    def console(self) -> Path:
        return self.directory / "console.log"

    @property
    def log(self) -> Path:
        return self.directory / "qemu.log"

    @property
    def pid(self) -> Path:
        return self.directory / "qemu.pid"

    @property
    def qmp(self) -> Path:
        return self.directory / "qmp.sock"


def metal_argv(spec: MetalSpec, files: MetalFiles, *, kernel: Path, link: str, mac: str, tsc_khz: int) -> list[str]:
    """The root disk is an NVMe device before all others on the bus, so that the kernel numbers it first."""
    cmdline = f"root=/dev/nvme0n1 rw console=ttyS0,115200 quiet panic=10 net.ifnames=0 tsc_early_khz={tsc_khz}"
    cmdline += " intel_iommu=on iommu=pt"
    argv = [PROGRAM, "-name", f"guest={spec.name},debug-threads=on", "-nodefaults", "-no-user-config", "-display", "none"]
    argv += ["-machine", "q35,accel=tcg", "-cpu", "max", "-smp", f"{spec.cores},sockets=1,cores={spec.cores},threads=1"]
    argv += ["-m", f"{spec.memory_bytes >> 20}M", "-device", "intel-iommu,intremap=on,caching-mode=on"]
    argv += ["-kernel", str(kernel), "-append", cmdline]
    argv += ["-drive", f"file={files.disk},format=raw,if=none,id=root,cache=unsafe,discard=unmap"]
    argv += ["-device", "nvme,drive=root,serial=root,bus=pcie.0,addr=0x2"]
    argv += ["-netdev", f"tap,id=uplink,ifname={link},script=no,downscript=no"]
    argv += ["-device", f"virtio-net-pci,netdev=uplink,mac={mac},bus=pcie.0,addr=0x3,romfile="]
    argv += [
        "-object",
        "rng-random,id=random,filename=/dev/urandom",
        "-device",
        "virtio-rng-pci,rng=random,bus=pcie.0,addr=0x4",
    ]
    for index, device in enumerate(spec.devices):
        argv += _behind_port(index, device, files)
    argv += ["-chardev", f"file,id=serial,path={files.console},append=on", "-serial", "chardev:serial"]
    argv += ["-chardev", f"socket,id=qmp,path={files.qmp},server=on,wait=off", "-mon", "chardev=qmp,mode=control"]
    argv += ["-daemonize", "-pidfile", str(files.pid), "-D", str(files.log)]
    return argv


def _behind_port(index: int, device: str, files: MetalFiles) -> list[str]:
    """Root ports on a slot of their own each: functions of one slot would share an IOMMU group."""
    chassis, port = FIRST_CHASSIS + index, f"port{index}"
    argv = ["-device", f"pcie-root-port,id={port},chassis={chassis},slot={chassis},bus=pcie.0,addr={hex(8 + index)}"]
    match device:
        case "nvme":
            argv += ["-drive", f"file={files.accelerator_disk},format=raw,if=none,id=accelerator,cache=unsafe"]
            argv += ["-device", f"nvme,drive=accelerator,serial=accelerator,bus={port}"]
        case "e1000e":
            argv += ["-netdev", f"hubport,id=nowhere{index},hubid={index}"]
            argv += ["-device", f"e1000e,netdev=nowhere{index},bus={port},romfile="]
        case _:
            argv += ["-device", f"{device},bus={port}"]
    return argv
