"""Changes of VMs. The one rule: what a request takes (share of a host, address, disk) it takes in its own transaction.

The row's own columns are set last in each function: the frame raises the generation of a row that is dirty at the end.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.errors import FieldError, InvalidInput
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.core.json import Json
from controlplane.core.sealing import Sealer
from controlplane.core.sshkey import checked_public_key
from controlplane.kernel import service as kernel
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.network import Network
from controlplane.models.project import Project
from controlplane.models.vm import Vm
from controlplane.placement.explain import count_rejections, explain
from controlplane.placement.queue import count_ahead
from controlplane.placement.request import PlacementRequest
from controlplane.placement.reserve import Placement, reserve, resize_reservation
from controlplane.resources.image.errors import ImageNotAvailable
from controlplane.resources.loadbalancer import service as loadbalancers
from controlplane.resources.network.errors import NetworkNotFound
from controlplane.resources.network.queries import is_encrypted
from controlplane.resources.nic.service import allocate_nic
from controlplane.resources.quota import service as quotas
from controlplane.resources.vm.errors import (
    VmContainersNotAllowed,
    VmDeleting,
    VmDiskTooSmall,
    VmHostForbidden,
    VmHostUnknown,
    VmImageUnknown,
    VmIsolationUnsupported,
    VmMemoryTooSmall,
    VmNetworkUnknown,
    VmNoCapacity,
    VmProtected,
    VmSshKeyInvalid,
    VmStopped,
)
from controlplane.resources.vm.request import request_for
from controlplane.resources.vm.schemas import VmCreate, VmResize, VmUpdate, VmVolume
from controlplane.resources.volume import service as volumes
from controlplane.settings import LimitSettings

PROGRAM = "vm"
MOST_TRIES = 1000


def seal_context(vm_id: str) -> str:
    return f"vm.user_data:{vm_id}"


async def create(
    session: AsyncSession, project: Project, actor: Actor, sealer: Sealer, wanted: VmCreate, *, limits: LimitSettings
) -> Vm:
    """Write the VM with its disks and interface, placed and reserved; raises the errors of this noun, keeping nothing."""
    image = await _image(session, wanted.image)
    network_id = await _network_id(session, project.id, wanted.network)
    disk_bytes = _disk_bytes(wanted, image)
    _refuse_container(project, wanted, image)
    host = await _host_id(session, actor, wanted.placement.host)
    await quotas.check(
        session, project.id, vms=1, vcpus=wanted.vcpus, memory_bytes=wanted.memory_bytes, volumes=1, disk_bytes=disk_bytes
    )
    vm = _row(project, wanted, image, sealer, host=host)
    vm.placement = {**vm.placement, "needs_tunnel": await is_encrypted(session, network_id)}
    session.add(vm)
    await session.flush()
    await volumes.create_root(session, vm, size_bytes=disk_bytes)
    await _add_volumes(session, vm, wanted.volumes, limits)
    await place(session, vm, image.architecture)
    if vm.host_id is None and wanted.on_no_capacity == "fail":
        assert vm.shortage is not None
        raise VmNoCapacity(str(vm.shortage["detail"]), placement=vm.shortage)
    try:
        await allocate_nic(session, network_id, owner_id=vm.id, host_id=vm.host_id)
    except NetworkNotFound as error:  # it was there a moment ago
        raise VmNetworkUnknown(f"network {wanted.network} was deleted meanwhile") from error
    await kernel.start(session, PROGRAM, vm.id, host_id=vm.host_id)
    return vm


async def _add_volumes(session: AsyncSession, vm: Vm, wanted: list[VmVolume], limits: LimitSettings) -> None:
    """Volumes that exist bind the machine to their host; new ones come to its host with it."""
    if any(item.volume is None for item in wanted):
        await volumes.check_count(session, vm.project_id, most=limits.volumes - len(wanted) + 1)
    host_ids: set[str] = set()
    for index, item in enumerate(wanted):
        if item.volume is None:
            volume = await volumes.describe(session, vm.project_id, item.as_volume())
            await quotas.check(session, vm.project_id, volumes=1, disk_bytes=volume.size_bytes)
            session.add(volume)
            host_ids |= {await volumes.host_of_snapshot(session, volume)} - {""}
        else:
            volume = await volumes.free_one(session, vm.project_id, item.volume, pointer=f"/volumes/{index}/volume")
        host_ids |= {volume.host_id} if volume.host_id else set()
        volume.vm_id, volume.attached_at, volume.delete_with_vm = vm.id, func.now(), item.delete_with_vm
        await session.flush()
    await volumes.check_hosts(session, {*host_ids, *filter(None, [str(vm.placement.get("host") or "")])})
    if host_ids:
        vm.placement = {**vm.placement, "host": host_ids.pop()}
    vm.placement = {**vm.placement, "disks": {**await volumes.unplaced_bytes(session, vm.id)}}


def _row(project: Project, wanted: VmCreate, image: Image, sealer: Sealer, *, host: str | None) -> Vm:
    """The row as the request has it, before it is placed; raises VmSshKeyInvalid."""
    vm_id = new_id(Kind.VM)
    return Vm(
        id=vm_id,
        project_id=project.id,
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
        is_protected=wanted.is_protected,
        image_id=image.id,
        isolation=wanted.isolation,
        vcpus=wanted.vcpus,
        memory_bytes=wanted.memory_bytes,
        applied_vcpus=wanted.vcpus,
        applied_memory_bytes=wanted.memory_bytes,
        placement={
            "location": wanted.placement.location,
            "labels": dict(wanted.placement.host_labels),
            "host": host,
        },
        user=wanted.user or image.default_user,
        ssh_keys=_public_keys(wanted.ssh_keys),
        user_data_sealed=sealer.seal(wanted.user_data.encode(), context=seal_context(vm_id)) if wanted.user_data else None,
        power=wanted.power,
        on_guest_poweroff=wanted.on_guest_poweroff,
    )


def _public_keys(given: list[str]) -> list[str]:
    found: list[str] = []
    for index, text in enumerate(given):
        try:
            found.append(checked_public_key(text))
        except ValueError as error:
            raise VmSshKeyInvalid(str(error), errors=(FieldError(pointer=f"/ssh_keys/{index}", detail=str(error)),)) from error
    return found


def _refuse_container(project: Project, wanted: VmCreate, image: Image) -> None:
    if wanted.isolation != "container":
        return
    if not project.allow_containers:
        raise VmContainersNotAllowed(f"project {project.name} does not allow containers")
    detail = f"image {image.name} is a guest image: it boots as a VM"
    raise VmIsolationUnsupported(detail, errors=(FieldError(pointer="/isolation", detail=detail),))


async def place(session: AsyncSession, vm: Vm, architecture: str) -> Placement | None:
    """Reserve for a waiting VM, or write down what runs short; the caller holds the row's lock."""
    request = request_for(vm, architecture)
    ahead = await count_ahead(session, vm, request)
    placement = await _reserved(session, vm, request) if ahead == 0 else None
    if placement is None:
        explanation = await explain(session, request)
        count_rejections(explanation)
        vm.shortage = explanation.as_json() | _words_of_queue(ahead)
    else:
        vm.state, vm.host_id, vm.driver, vm.shortage = "placed", placement.host_id, placement.driver, None
    await session.flush()
    return placement


async def _reserved(session: AsyncSession, vm: Vm, request: PlacementRequest) -> Placement | None:
    """The share of a host and the room for the machine's new disks there, both or neither.

    None: there is no such host. Whoever takes the room between look and taking has made progress, so looking again ends.
    """
    for _ in range(MOST_TRIES):
        savepoint = await session.begin_nested()
        placement = await reserve(session, vm.id, request)
        if placement is None or await volumes.put_machine_on_host(session, vm.id, placement.host_id):
            await savepoint.commit()
            return placement
        await savepoint.rollback()  # somebody took the room meanwhile
    return None


def _words_of_queue(ahead: int) -> dict[str, Json]:
    if not ahead:
        return {}
    who = "one machine that asked" if ahead == 1 else f"{ahead} machines that asked"
    return {"detail": f"{who} earlier for no more than this still {'waits' if ahead == 1 else 'wait'} for room"}


async def _image(session: AsyncSession, ref: str) -> Image:
    column = Image.id if is_id(ref, Kind.IMAGE) else Image.name
    image = await session.scalar(select(Image).where(column == ref).with_for_update(key_share=True, read=True))
    if image is None or image.purpose != "guest":
        raise VmImageUnknown(f"no image {ref}", errors=(FieldError(pointer="/image", detail=f"no image {ref}"),))
    if image.state != "available":
        raise ImageNotAvailable(f"image {image.name} is {image.state}")
    return image


async def _network_id(session: AsyncSession, project_id: str, ref: str) -> str:
    column = Network.id if is_id(ref, Kind.NETWORK) else Network.name
    found = await session.scalar(select(Network.id).where(column == ref, Network.project_id == project_id))
    if found is None:
        raise VmNetworkUnknown(f"no network {ref}", errors=(FieldError(pointer="/network", detail=f"no network {ref}"),))
    return found


async def _host_id(session: AsyncSession, actor: Actor, ref: str) -> str:
    if not ref:
        return ""
    if not actor.is_operator:
        raise VmHostForbidden("placement.host is the operator's to choose")
    column: ColumnElement[Any] = Host.id.expression if is_id(ref, Kind.HOST) else Host.name.expression
    found = await session.scalar(select(Host.id).where(column == ref))
    if found is None:
        raise VmHostUnknown(f"no host {ref}", errors=(FieldError(pointer="/placement/host", detail=f"no host {ref}"),))
    return found


def _disk_bytes(wanted: VmCreate, image: Image) -> int:
    if wanted.memory_bytes < image.min_memory_bytes:
        detail = f"{image.name} needs {image.min_memory_bytes} bytes of memory"
        raise VmMemoryTooSmall(detail, errors=(FieldError(pointer="/memory_bytes", detail=detail),))
    if wanted.disk_bytes is not None and wanted.disk_bytes < image.min_disk_bytes:
        detail = f"{image.name} needs a disk of {image.min_disk_bytes} bytes"
        raise VmDiskTooSmall(detail, errors=(FieldError(pointer="/disk_bytes", detail=detail),))
    return wanted.disk_bytes or image.min_disk_bytes


async def _tell(session: AsyncSession, vm: Vm) -> None:
    """Make the program look; raises VmDeleting."""
    _check_owner(vm)
    if vm.state == "deleting":
        raise VmDeleting(f"{vm.name} is being deleted")
    await kernel.start(session, PROGRAM, vm.id, host_id=vm.host_id)


def _check_owner(vm: Vm) -> None:
    if vm.owner_id is not None:
        raise VmProtected(f"{vm.name} is the machine of {vm.owner_id}: change its endpoint instead")


def _apply_size(vm: Vm) -> None:
    vm.applied_vcpus, vm.applied_memory_bytes = vm.vcpus, vm.memory_bytes


async def update(session: AsyncSession, vm: Vm, changes: VmUpdate) -> Vm:
    await _tell(session, vm)
    for name, value in changes.model_dump(exclude_unset=True).items():
        setattr(vm, name, value)
    return vm


async def start(session: AsyncSession, vm: Vm) -> Vm:
    """Want it running. On one that is wanted running but went down by itself: start it once more."""
    await _tell(session, vm)
    if vm.power == "running" and vm.observed_power in ("stopped", "failed"):
        vm.restart_generation += 1
    if vm.observed_power != "running":
        _apply_size(vm)
    vm.power = "running"
    return vm


async def stop(session: AsyncSession, vm: Vm) -> Vm:
    await _tell(session, vm)
    vm.power = "stopped"
    return vm


async def restart(session: AsyncSession, vm: Vm) -> Vm:
    """Stop and start once, with the wanted size; raises VmStopped."""
    await _tell(session, vm)
    if vm.power != "running":
        raise VmStopped(f"{vm.name} shall be stopped: start it")
    _apply_size(vm)
    vm.restart_generation += 1
    return vm


async def resize(session: AsyncSession, vm: Vm, size: VmResize) -> Vm:
    """Hold the larger of old and new size at once; the new one applies at the next start. Raises VmNoCapacity."""
    if size.vcpus is None and size.memory_bytes is None:
        raise InvalidInput("give vcpus, memory_bytes or both", errors=(FieldError(pointer="", detail="no size is given"),))
    await _tell(session, vm)
    image = await session.get_one(Image, vm.image_id)
    vcpus, memory_bytes = size.vcpus or vm.vcpus, size.memory_bytes or vm.memory_bytes
    if memory_bytes < image.min_memory_bytes:
        detail = f"{image.name} needs {image.min_memory_bytes} bytes of memory"
        raise VmMemoryTooSmall(detail, errors=(FieldError(pointer="/memory_bytes", detail=detail),))
    await quotas.check(session, vm.project_id, vcpus=vcpus - vm.vcpus, memory_bytes=memory_bytes - vm.memory_bytes)
    is_at_rest = vm.host_id is None or (vm.power == "stopped" and vm.observed_power == "stopped")
    if vm.host_id is not None:
        held = request_for(vm, image.architecture, vcpus=vcpus, memory_bytes=memory_bytes)
        if not is_at_rest:
            held = request_for(
                vm,
                image.architecture,
                vcpus=max(vcpus, vm.applied_vcpus),
                memory_bytes=max(memory_bytes, vm.applied_memory_bytes),
            )
        if not await resize_reservation(session, vm.id, held):
            host = await session.get_one(Host, vm.host_id)
            free_vcpus = host.allocatable_vcpus - host.reserved_vcpus
            free_memory_bytes = host.allocatable_memory_bytes - host.reserved_memory_bytes
            raise VmNoCapacity(
                f"the VM's host has {free_vcpus} cores and {free_memory_bytes} bytes of memory left",
                free_vcpus=free_vcpus,
                free_memory_bytes=free_memory_bytes,
            )
    vm.vcpus, vm.memory_bytes = vcpus, memory_bytes
    if is_at_rest:
        _apply_size(vm)
    return vm


async def remove(session: AsyncSession, vm: Vm) -> Vm:
    """Begin to delete; doing it twice is once. Raises VmProtected."""
    if vm.state == "deleting":
        return vm
    _check_owner(vm)
    if vm.is_protected:
        raise VmProtected(f"{vm.name} is protected")
    await volumes.check_leaving(session, vm)
    await kernel.start(session, PROGRAM, vm.id, host_id=vm.host_id)
    await kernel.destroy(session, PROGRAM, vm.id)
    await loadbalancers.machine_changed(session, vm.id)
    vm.state, vm.deleting_at, vm.shortage = "deleting", func.now(), None
    return vm
