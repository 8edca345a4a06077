"""Every machine driver that runs workloads: images come as they were, each at its path, and nothing can be written there.

The guests are the smallest that can tell: a container's busybox, and a VM whose initramfs does what a guest's runner does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.drivers.machine import imagedisk, kvm
from hostagent.drivers.machine.container import ContainerMachine
from hostagent.drivers.machine.protocol import MachineDriver, MachinePlan, MountAttachment
from hostagent.drivers.machine.qemu import QemuMachine
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.wanted import (
    FileWanted,
    Generation,
    ImageWanted,
    KernelBoot,
    MountWanted,
    SeedWanted,
    VmWanted,
    WorkloadWanted,
)
from provisioning.images.build import build
from provisioning.images.kernel import _entry
from provisioning.images.manifest import read_manifest
from tests.conformance.conftest import Daemon

pytestmark = pytest.mark.timeout(900)  # the first run on a machine builds the guest image
ONE = Generation(epoch=1, number=1)
VMS = ("vm_1", "vm_2")
SECONDS = 90
SAY = """
cat /weights/model /bin/said
echo try > /weights/x
echo "$PLAIN $SECRET"
echo "that is all"
"""
# What a guest's runner does, by the disks' serial numbers; then the machine is switched off.
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs devtmpfs /dev
/bin/busybox mkdir -p /sys /proc /seed /lower
/bin/busybox mount -t sysfs sysfs /sys
while read -r module; do /bin/busybox insmod "/lib/$module"; done < /modules
disk() { for found in /sys/block/vd*; do [ "$(/bin/busybox cat "$found/serial")" = "$1" ] && echo "/dev/${found##*/}"; done; }
/bin/busybox mount -t vfat -o ro "$(disk seed)" /seed
/bin/busybox mount -t ext4 -o ro "$(disk workload-root)" /lower
/bin/busybox mount -t ext4 -o ro "$(disk mount0)" /lower/weights
/bin/busybox cat /seed/workload.json
echo x > /lower/x
export PLAIN=plain SECRET=planted
/bin/busybox chroot /lower /bin/sh /bin/say
/bin/busybox poweroff -f
"""


@dataclasses.dataclass
class Bench:
    driver: MachineDriver
    plans: list[MachinePlan]

    async def said(self, index: int = 0) -> str:
        """Everything that a machine printed, as soon as it has ended."""
        plan = self.plans[index]

        async def has_ended() -> bool:
            observed = await self.driver.observe(plan.vm.id)
            return observed is not None and observed.state == "stopped"

        assert await until(has_ended, seconds=SECONDS), plan.log_path.read_text(errors="replace")
        return plan.log_path.read_text(errors="replace").replace("\r", "")


PARAMS = [
    pytest.param("qemu", marks=[pytest.mark.caps("root", "qemu", "debootstrap", "busybox")]),
    pytest.param("container", marks=[pytest.mark.caps("root", "runc", "busybox")]),
]


@pytest.fixture(params=PARAMS)
async def bench(request: pytest.FixtureRequest, paths: Paths, daemon: Daemon) -> AsyncIterator[Bench]:
    engine, weights = _images(paths)
    made = await {"qemu": _qemu, "container": _container}[request.param](paths, daemon, engine, weights)
    yield made
    for plan in made.plans:
        await made.driver.remove(plan.vm.id)


def _images(paths: Paths) -> tuple[ImageWanted, ImageWanted]:
    """An engine's tree of busybox, and weights; laid out as the agent does."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for directory in ("bin", "dev", "etc", "proc", "sys", "tmp", "var", "weights"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        busybox = Path(shutil.which("busybox") or "").read_bytes()
        for name, data in (("bin/busybox", busybox), ("bin/say", SAY.encode()), ("bin/said", b"the engine\n")):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
        for name in ("sh", "cat"):
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(entry)
    made = []
    for image_id, name, data in (("img_engine", "root.tar", content.getvalue()), ("img_weights", "model", b"the weights\n")):
        directory = paths.image_directory(image_id)
        directory.mkdir(parents=True)
        (directory / name).write_bytes(data)
        file = FileWanted(name=name, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        made.append(ImageWanted(id=image_id, generation=ONE, purpose="weights", files=(file,)))
    return made[0], made[1]


def _plan(paths: Paths, vm_id: str, wanted: VmWanted) -> MachinePlan:
    uid = 0x7800_0000 + 65_536 * VMS.index(vm_id)
    return MachinePlan(
        vm=dataclasses.replace(wanted, id=vm_id),
        disks=(),
        nics=(),
        image_directory=paths.image_directory(wanted.image_id),
        run_directory=paths.vm_run_directory(vm_id),
        state_directory=paths.vm_directory(vm_id),
        log_path=paths.vm_log(vm_id),
        uid=uid,
        gid=uid,
        uid_count=65_536,
    )


WORKLOAD = WorkloadWanted(
    argv=("/bin/sh", "/bin/say"),
    env={"PLAIN": "plain"},
    secret_env={"SECRET": "planted"},
    mounts=(MountWanted(image_id="img_weights", path="/weights"),),
    root_image_id="img_engine",
)
WANTED = VmWanted(
    id="",
    generation=ONE,
    driver="container",
    vcpus=1,
    memory_bytes=192 << 20,
    image_id="img_engine",
    boot=None,
    disks=(),
    nics=(),
    seed=SeedWanted(hostname="small"),
    workload=WORKLOAD,
)


async def _container(paths: Paths, daemon: Daemon, engine: ImageWanted, weights: ImageWanted) -> Bench:
    plans = [
        dataclasses.replace(
            _plan(paths, vm_id, WANTED),
            root=MountAttachment(source=paths.image_directory(engine.id), path="/"),
            mounts=(MountAttachment(source=paths.image_directory(weights.id), path="/weights"),),
        )
        for vm_id in VMS
    ]
    return Bench(driver=ContainerMachine(daemon.driver, paths), plans=plans)


async def _qemu(paths: Paths, daemon: Daemon, engine: ImageWanted, weights: ImageWanted) -> Bench:
    image = build()
    guest = paths.image_directory("img_guest")
    guest.mkdir()
    boot = read_manifest(image).boot
    shutil.copyfile(image / boot.kernel_file, guest / "vmlinux")
    init = _entry("init", stat.S_IFREG | 0o755, INIT.encode()) + _entry("TRAILER!!!", 0, b"")
    (guest / "initramfs").write_bytes((image / boot.initramfs_file).read_bytes() + init)  # the later archive wins
    kernel = KernelBoot(kernel_file="vmlinux", initramfs_file="initramfs", cmdline="console=ttyS0 quiet panic=-1")
    wanted = dataclasses.replace(WANTED, driver="qemu", image_id="img_guest", boot=kernel)
    disks = [
        await imagedisk.make_disk(paths.image_disks, found, paths.image_directory(found.id)) for found in (engine, weights)
    ]
    root, mount = (
        MountAttachment(source=disk, path=path, form="disk") for disk, path in zip(disks, ("/", "/weights"), strict=True)
    )
    plans = [dataclasses.replace(_plan(paths, vm_id, wanted), root=root, mounts=(mount,)) for vm_id in VMS]
    return Bench(driver=QemuMachine(daemon.driver, paths, tsc_khz=kvm.tsc_khz(), power_off_seconds=1.0), plans=plans)


async def test_a_workload_sees_its_images_and_writes_none(bench: Bench) -> None:
    """Two machines at once share the same images."""
    for plan in bench.plans:
        assert (await bench.driver.apply(plan)).state == "running"
    for index in range(len(bench.plans)):
        said = await bench.said(index)
        assert "the weights\nthe engine\n" in said
        assert "plain planted\n" in said
        assert "Read-only file system" in said or "Permission denied" in said
        assert "that is all" in said
