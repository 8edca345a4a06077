"""From rows to the documents a host is told. The one rule: the same generation always gives the same document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from controlplane.models.image import Image
from controlplane.models.nic import Nic
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.nic.queries import wanted_nic
from hostagent.protocol import codec
from hostagent.protocol.wanted import (
    DiskWanted,
    FirmwareBoot,
    Generation,
    KernelBoot,
    SeedWanted,
    VmWanted,
    WorkloadWanted,
)

Driver = Literal["qemu", "cloud_hypervisor", "container", "fake"]


def boot_of(image: Image, driver: str) -> KernelBoot | FirmwareBoot | None:
    """None for containers, which have no kernel of their own."""
    boot = {key: str(value) for key, value in image.boot.items()}
    if driver == "container" or boot["kind"] == "none":
        return None
    if boot["kind"] == "kernel":
        return KernelBoot(kernel_file=boot["kernel_file"], initramfs_file=boot["initramfs_file"], cmdline=boot["cmdline"])
    return FirmwareBoot(firmware_file=boot["firmware_file"])


def vm_document(
    vm: Vm, image: Image, volumes: Sequence[Volume], nics: Sequence[Nic], *, epoch: int, user_data: str
) -> VmWanted:
    generation = Generation(epoch=epoch, number=vm.generation)
    return VmWanted(
        id=vm.id,
        generation=generation,
        driver=cast("Driver", vm.driver),
        vcpus=vm.applied_vcpus,
        memory_bytes=vm.applied_memory_bytes,
        image_id=vm.image_id,
        boot=boot_of(image, vm.driver or ""),
        disks=tuple(DiskWanted(volume_id=volume.id, is_boot=volume.is_boot) for volume in volumes),
        nics=tuple(wanted_nic(nic, generation) for nic in nics),
        seed=SeedWanted(
            hostname=vm.name,
            user=vm.user,
            ssh_authorized_keys=tuple(str(key) for key in vm.ssh_keys),
            user_data=user_data,
        ),
        power="stopped" if vm.power == "stopped" else "running",
        restart_generation=vm.restart_generation,
        on_guest_poweroff="restart" if vm.on_guest_poweroff == "restart" else "stop",
        workload=codec.decode(WorkloadWanted, vm.workload) if vm.workload is not None else None,
    )


def images_of(vm: Vm) -> tuple[str, ...]:
    """Every image that must lie on the host before the machine starts: its own, and those that its workload mounts."""
    workload = codec.decode(WorkloadWanted, vm.workload).image_ids if vm.workload is not None else ()
    return tuple(dict.fromkeys(image_id for image_id in (vm.image_id, *workload) if image_id))
