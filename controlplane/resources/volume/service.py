"""Changes of volumes. The one rule: a volume's room on its host is taken in the transaction that puts it there.

Long, because what a volume may be asked is one list.
Rows are locked in one order, machine before volume, here and in both programs. A machine whose disks change gets a new
generation here, because its document changes.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.kernel import service as kernel
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.run import Run
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_pool import StoragePool
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.image.errors import ImageNotAvailable
from controlplane.resources.quota import service as quotas
from controlplane.resources.storage_pool import layers
from controlplane.resources.storage_pool import service as pools
from controlplane.resources.volume.document import backend_of
from controlplane.resources.volume.errors import (
    VolumeAttached,
    VolumeDeleting,
    VolumeHostDiffers,
    VolumeHostForbidden,
    VolumeHostUnknown,
    VolumeImageUnknown,
    VolumeInUse,
    VolumeIsRoot,
    VolumeLimitReached,
    VolumeLimitsInvalid,
    VolumeNotAttached,
    VolumeNotReady,
    VolumeNotRetained,
    VolumePoolDiffers,
    VolumePoolUnknown,
    VolumeProtected,
    VolumeShrinkRefused,
    VolumeSnapshotNotReady,
    VolumeSnapshotUnknown,
    VolumeTooSmall,
    VolumeUnknown,
    VolumeVmDeleting,
    VolumeVmFailed,
    VolumeVmFull,
    VolumeVmUnknown,
)
from controlplane.resources.volume.schemas import VolumeAttach, VolumeCreate, VolumeUpdate

PROGRAM = "volume"
VM_PROGRAM = "vm"
MOST_OF_A_VM = 16
VM_FAILED = "volume.vm_failed"
SPDK_IOPS, SPDK_BYTES = 1000, 1 << 20  # the floor and step of its limits


async def create(session: AsyncSession, project_id: str, actor: Actor, wanted: VolumeCreate, *, most: int) -> Volume:
    """Write the volume with its room taken, and attach it when asked; raises the errors of this noun, keeping nothing."""
    vm = await machine_named(session, project_id, wanted.vm) if wanted.vm is not None else None
    await check_count(session, project_id, most=most)
    volume = await describe(session, project_id, wanted)
    await quotas.check(session, project_id, volumes=1, disk_bytes=volume.size_bytes)
    host_id = await _host_id(session, actor, wanted.host)
    if vm is not None:
        await _check_machine(session, vm)
        volume.vm_id, volume.attached_at = vm.id, func.now()
    session.add(volume)
    snapshot = await session.get(Snapshot, volume.snapshot_id) if volume.snapshot_id else None
    forced = {found for found in (host_id, vm and vm.host_id, snapshot and snapshot.host_id) if found}
    if len(forced) > 1:
        raise await _differs(session, forced)
    if forced and vm is not None and vm.host_id is None:
        raise VolumeHostDiffers(f"{vm.name} waits for a host; attach when it has one")
    if forced:
        await put_on_host(session, volume, forced.pop())
    elif vm is None:
        await _find_host(session, volume)
    await session.flush()
    if vm is not None:
        await _tell_machine(session, vm)
    if volume.host_id is not None:  # else its machine starts it when that has a host
        await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    return volume


async def describe(session: AsyncSession, project_id: str, wanted: VolumeCreate) -> Volume:
    """The row as the request has it, on no host yet."""
    image = await _image(session, wanted.image) if wanted.image is not None else None
    snapshot = await _snapshot(session, project_id, wanted) if wanted.snapshot is not None else None
    least = image.min_disk_bytes if image is not None else snapshot.size_bytes if snapshot is not None else 0
    size_bytes = wanted.size_bytes or least
    if size_bytes < least:
        detail = f"it begins as {wanted.image or wanted.snapshot}, which needs {least} bytes"
        raise VolumeTooSmall(detail, errors=(FieldError(pointer="/size_bytes", detail=detail),))
    return Volume(
        id=new_id(Kind.VOLUME),
        project_id=project_id,
        name=wanted.name,
        description=wanted.description,
        labels=dict(wanted.labels),
        is_protected=wanted.is_protected,
        retention_hours=wanted.retention_hours,
        size_bytes=size_bytes,
        image_id=image.id if image is not None else None,
        snapshot_id=snapshot.id if snapshot is not None else None,
        pool=snapshot.pool if snapshot is not None else wanted.pool,
        unlock=wanted.unlock,
        num_queues=wanted.num_queues,
        queue_size=wanted.queue_size,
        **wanted.limits.model_dump(),
    )


async def create_root(session: AsyncSession, vm: Vm, *, size_bytes: int) -> Volume:
    """The root disk of a machine that has no host yet; its name is its id, so it never takes one that a person may want."""
    volume_id = new_id(Kind.VOLUME)
    volume = Volume(
        id=volume_id,
        project_id=vm.project_id,
        owner_id=vm.owner_id,
        name=volume_id.replace("_", "-"),
        size_bytes=size_bytes,
        image_id=vm.image_id,
        vm_id=vm.id,
        attached_at=func.now(),
        is_boot=True,
        delete_with_vm=True,
    )
    session.add(volume)
    await session.flush()
    return volume


async def put_machine_on_host(session: AsyncSession, vm_id: str, host_id: str) -> bool:
    """The machine's volumes that lie nowhere yet come to its host; False: there is no room, and the caller undoes all."""
    query = select(Volume).where(Volume.vm_id == vm_id, Volume.host_id.is_(None)).order_by(Volume.id)
    for volume in list(await session.scalars(query.with_for_update(key_share=True))):
        try:
            await put_on_host(session, volume, host_id)
        except pools.StoragePoolNoSpace:
            return False
    await session.flush()
    return True


async def put_on_host(session: AsyncSession, volume: Volume, host_id: str) -> None:
    """Take the room in the volume's pool there. Raises VolumePoolUnknown, StoragePoolNoSpace, VolumeLimitsInvalid."""
    if not await pools.take(session, host_id, volume.pool, volume.size_bytes):
        short = await pools.shortage(session, volume.pool, volume.size_bytes, host_id)
        raise pools.no_space(short, volume.pool) if short.pools else _pool_unknown(volume.pool)
    await _set_host(session, volume, host_id)


async def _find_host(session: AsyncSession, volume: Volume) -> None:
    if await session.scalar(select(StoragePool.id).where(StoragePool.name == volume.pool).limit(1)) is None:
        raise _pool_unknown(volume.pool)
    architecture = await session.scalar(select(Image.architecture).where(Image.id == volume.image_id))
    host_id = await pools.choose(session, volume.pool, volume.size_bytes, architecture=architecture or "")
    await _set_host(session, volume, host_id)


async def _set_host(session: AsyncSession, volume: Volume, host_id: str) -> None:
    assert volume.host_id is None, "its data is where it is"
    host = await session.get_one(Host, host_id)
    volume.host_id, volume.backend = host_id, backend_of(host)
    _check_backend(volume)
    await session.flush()
    await layers.lay(session, volume.id, host_id, volume.pool, volume.size_bytes)
    if volume.snapshot_id is not None:
        await layers.stand_on(session, volume.id, volume.snapshot_id)


def _pool_unknown(name: str) -> VolumePoolUnknown:
    detail = f"no storage pool {name} there"
    return VolumePoolUnknown(detail, errors=(FieldError(pointer="/pool", detail=detail),))


def _check_backend(volume: Volume) -> None:
    """SPDK limits in steps of 1,000 requests and one MiB a second; raises VolumeLimitsInvalid."""
    if volume.backend != "spdk":
        return
    for name, step in (("iops", SPDK_IOPS), ("bytes_per_second", SPDK_BYTES)):
        if (getattr(volume, name) or 0) % step:
            detail = f"the host's storage (spdk) limits {name} in steps of {step}"
            raise VolumeLimitsInvalid(detail, errors=(FieldError(pointer=f"/limits/{name}", detail=detail),))
    if volume.burst_iops or volume.burst_bytes_per_second:
        detail = "the host's storage (spdk) knows no bursts"
        raise VolumeLimitsInvalid(detail, errors=(FieldError(pointer="/limits/burst_iops", detail=detail),))


async def check_count(session: AsyncSession, project_id: str, *, most: int) -> None:
    own = Volume.project_id == project_id, Volume.owner_id.is_(None)
    count = await session.scalar(select(func.count()).select_from(Volume).where(*own)) or 0
    if count >= most:
        raise VolumeLimitReached(f"the project has {count} volumes, {most} are the most")


async def free_one(session: AsyncSession, project_id: str, ref: str, *, pointer: str) -> Volume:
    """A volume that a machine may have, locked; raises VolumeUnknown, VolumeAttached and what `check_usable` does."""
    column = Volume.id if is_id(ref, Kind.VOLUME) else Volume.name
    query = select(Volume).where(column == ref, Volume.project_id == project_id, Volume.owner_id.is_(None))
    found = await session.scalar(query.with_for_update(key_share=True))
    if found is None:
        raise VolumeUnknown(f"no volume {ref}", errors=(FieldError(pointer=pointer, detail=f"no volume {ref}"),))
    check_usable(found)
    if found.vm_id is not None:
        raise VolumeAttached(f"{found.name} is attached to a VM", vm_id=found.vm_id)
    return found


async def check_hosts(session: AsyncSession, host_ids: set[str]) -> None:
    """Raises VolumeHostDiffers unless they are one."""
    if len(host_ids) > 1:
        raise await _differs(session, host_ids)


async def unplaced_bytes(session: AsyncSession, vm_id: str) -> dict[str, int]:
    """What the machine's volumes that lie nowhere yet need, by pool."""
    query = select(Volume.pool, func.sum(Volume.size_bytes)).where(Volume.vm_id == vm_id, Volume.host_id.is_(None))
    return {row[0]: int(row[1]) for row in await session.execute(query.group_by(Volume.pool))}


# -- machines ---------------------------------------------------------------------------------------------------------


async def machine_named(session: AsyncSession, project_id: str, ref: str) -> Vm:
    """The tenant's machine, locked before any volume is; raises VolumeVmUnknown."""
    column = Vm.id if is_id(ref, Kind.VM) else Vm.name
    query = select(Vm).where(column == ref, Vm.project_id == project_id, Vm.owner_id.is_(None))
    found = await session.scalar(query.with_for_update(key_share=True))
    if found is None:
        raise VolumeVmUnknown(f"no VM {ref}", errors=(FieldError(pointer="/vm", detail=f"no VM {ref}"),))
    return found


async def lock_machine_of(session: AsyncSession, project_id: str, ref: str) -> Vm | None:
    """The machine that has the volume, locked; None: none has. The volume itself is locked after it."""
    column = Volume.id if is_id(ref, Kind.VOLUME) else Volume.name
    vm_id = await session.scalar(select(Volume.vm_id).where(column == ref, Volume.project_id == project_id))
    if vm_id is None:
        return None
    return await session.scalar(select(Vm).where(Vm.id == vm_id).with_for_update(key_share=True))


async def _check_machine(session: AsyncSession, vm: Vm) -> None:
    if vm.state == "deleting":
        raise VolumeVmDeleting(f"{vm.name} is being deleted")
    count = await session.scalar(select(func.count()).select_from(Volume).where(Volume.vm_id == vm.id)) or 0
    if count >= MOST_OF_A_VM:
        raise VolumeVmFull(f"{vm.name} has {count} volumes, {MOST_OF_A_VM} are the most")
    if (parked := await parked_machine(session, vm.id)) is not None:
        raise VolumeVmFailed(f"{vm.name} has failed ({parked.parked_code}): {parked.parked_detail}", cause=parked.parked_code)


async def parked_machine(session: AsyncSession, vm_id: str) -> Run | None:
    """The machine's run, if it waits for a person: nothing about its disks is carried out meanwhile."""
    query = select(Run).where(Run.program == VM_PROGRAM, Run.subject == vm_id, Run.finished_at.is_(None))
    return await session.scalar(query.where(Run.parked_at.is_not(None)).execution_options(populate_existing=True))


async def waits_for_machine(session: AsyncSession, volume_id: str) -> bool:
    """Whether its run is parked because its machine's was."""
    mine = Run.program == PROGRAM, Run.subject == volume_id, Run.finished_at.is_(None)
    return bool(await session.scalar(select(exists().where(*mine, Run.parked_code == VM_FAILED))))


async def _tell_machine(session: AsyncSession, vm: Vm) -> None:
    vm.generation += 1
    await kernel.start(session, VM_PROGRAM, vm.id, host_id=vm.host_id)


async def attach(session: AsyncSession, volume: Volume, vm: Vm, wanted: VolumeAttach) -> Volume:
    """The caller holds both rows, the machine's first."""
    check_usable(volume)
    if volume.vm_id is not None:
        where = vm.name if volume.vm_id == vm.id else "another VM"
        raise VolumeAttached(f"{volume.name} is attached to {where}", vm_id=volume.vm_id)
    await _check_machine(session, vm)
    if vm.host_id is not None and vm.host_id != volume.host_id:
        raise await _differs(session, {vm.host_id, volume.host_id or ""})
    if vm.host_id is None:
        raise VolumeHostDiffers(f"{vm.name} waits for a host; attach when it has one")
    await _tell_machine(session, vm)
    await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    volume.vm_id, volume.attached_at, volume.delete_with_vm = vm.id, func.now(), wanted.delete_with_vm
    return volume


async def detach(session: AsyncSession, volume: Volume, vm: Vm | None) -> Volume:
    """Begin to take it out; doing it twice is once. The caller holds both rows, the machine's first."""
    if volume.vm_id is None or vm is None:
        raise VolumeNotAttached(f"{volume.name} is in no VM")
    if volume.is_boot:
        raise VolumeIsRoot(f"{volume.name} is the root disk of {vm.name}")
    if volume.is_detaching or vm.state == "deleting":
        return volume
    await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    if vm.host_id is None:  # it was never there
        volume.vm_id, volume.attached_at, volume.delete_with_vm = None, None, False
        if volume.host_id is None:
            await _find_host(session, volume)
        return volume
    await _tell_machine(session, vm)
    await kernel.resume(session, VM_PROGRAM, vm.id)  # without the disk it may well come up
    volume.is_detaching = True
    return volume


def check_usable(volume: Volume) -> None:
    """Raises VolumeDeleting, VolumeNotReady."""
    if volume.state in ("retained", "deleting"):
        raise VolumeDeleting(f"{volume.name} is {volume.state}")
    if volume.state == "creating" or volume.host_id is None:
        raise VolumeNotReady(f"{volume.name} is not made yet")


async def _differs(session: AsyncSession, host_ids: set[Any]) -> VolumeHostDiffers:
    names = sorted(await session.scalars(select(Host.name).where(Host.id.in_(host_ids))))
    return VolumeHostDiffers(f"they are on different hosts: {', '.join(names)}", hosts=[*names])


# -- the volume itself ------------------------------------------------------------------------------------------------


async def grow(session: AsyncSession, volume: Volume, size_bytes: int) -> Volume:
    """Raises VolumeShrinkRefused, StoragePoolNoSpace."""
    check_usable(volume)
    assert volume.host_id is not None
    if size_bytes < volume.size_bytes:
        detail = f"{volume.name} has {volume.size_bytes} bytes"
        raise VolumeShrinkRefused(detail, errors=(FieldError(pointer="/size_bytes", detail=detail),))
    more = size_bytes - volume.size_bytes
    if more:
        await quotas.check(session, volume.project_id, disk_bytes=more)
        if not await layers.grow(session, volume, more):
            short = await pools.shortage(session, volume.pool, more, volume.host_id)
            raise pools.no_space(short, volume.pool)
        await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
        volume.size_bytes = size_bytes
    return volume


async def update(session: AsyncSession, volume: Volume, changes: VolumeUpdate) -> Volume:
    sent = changes.model_dump(exclude_unset=True)
    if volume.state == "deleting" or (volume.state == "retained" and set(sent) - {"retention_hours"}):
        raise VolumeDeleting(f"{volume.name} is {volume.state}")
    await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    if "limits" in sent:
        sent |= changes.limits.model_dump()
        del sent["limits"]
    for name, value in sent.items():
        setattr(volume, name, value)
    if volume.state == "retained" and volume.deleting_at is not None:
        volume.purge_at = volume.deleting_at + timedelta(hours=volume.retention_hours)
    _check_backend(volume)
    return volume


async def host_of_snapshot(session: AsyncSession, volume: Volume) -> str:
    """Where the snapshot lies that the volume begins as; empty without one."""
    if volume.snapshot_id is None:
        return ""
    return (await session.get_one(Snapshot, volume.snapshot_id)).host_id


async def check_leaving(session: AsyncSession, vm: Vm) -> None:
    """What would be deleted with the machine may be: raises VolumeProtected, VolumeInUse."""
    leaving = select(Volume).where(Volume.vm_id == vm.id, Volume.delete_with_vm, Volume.is_boot.is_(False))
    for volume in await session.scalars(leaving.order_by(Volume.id)):
        if volume.is_protected:
            raise VolumeProtected(f"{volume.name} goes with {vm.name} and is protected; detach it or lift the protection")
        await _check_not_taken(session, volume)


async def _check_not_taken(session: AsyncSession, volume: Volume) -> None:
    taking = select(Snapshot.name).where(Snapshot.volume_id == volume.id, Snapshot.state == "creating")
    if (name := await session.scalar(taking.limit(1))) is not None:
        raise VolumeInUse(f"snapshot {name} of {volume.name} is being taken")


async def remove(session: AsyncSession, volume: Volume) -> Volume:
    """Begin to delete, or to retain; doing it twice is once. Raises VolumeIsRoot, VolumeInUse, VolumeProtected."""
    if volume.state in ("retained", "deleting"):
        return volume
    if volume.is_boot:
        raise VolumeIsRoot(f"{volume.name} is a root disk: it goes with its VM")
    if volume.vm_id is not None:
        raise VolumeInUse(f"{volume.name} is attached", vm_id=volume.vm_id)
    if volume.is_protected:
        raise VolumeProtected(f"{volume.name} is protected")
    await _check_not_taken(session, volume)
    await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    if not await retain(session, volume):
        await kernel.destroy(session, PROGRAM, volume.id)
        volume.state, volume.deleting_at = "deleting", func.now()
    return volume


async def retain(session: AsyncSession, volume: Volume) -> bool:
    """Keep a deleted volume's data for as long as it says, in no machine; False: it is not to be kept, or there is none."""
    if volume.state != "available" or not volume.retention_hours:
        return False
    now = (await session.execute(select(func.now()))).scalar_one()
    volume.vm_id, volume.attached_at, volume.is_detaching, volume.delete_with_vm = None, None, False, False
    volume.state, volume.deleting_at, volume.purge_at = "retained", now, now + timedelta(hours=volume.retention_hours)
    volume.is_protected = False
    return True


async def restore(session: AsyncSession, volume: Volume) -> Volume:
    """Raises VolumeNotRetained."""
    if volume.state != "retained":
        raise VolumeNotRetained(f"{volume.name} is {volume.state}")
    await kernel.start(session, PROGRAM, volume.id, host_id=volume.host_id)
    volume.state, volume.deleting_at, volume.purge_at = "available", None, None
    return volume


# -- what is named in a request ---------------------------------------------------------------------------------------


async def _image(session: AsyncSession, ref: str) -> Image:
    column = Image.id if is_id(ref, Kind.IMAGE) else Image.name
    found = await session.scalar(select(Image).where(column == ref).with_for_update(key_share=True, read=True))
    if found is None or found.purpose != "guest":
        raise VolumeImageUnknown(f"no image {ref}", errors=(FieldError(pointer="/image", detail=f"no image {ref}"),))
    if found.state != "available":
        raise ImageNotAvailable(f"image {found.name} is {found.state}")
    return found


async def _snapshot(session: AsyncSession, project_id: str, wanted: VolumeCreate) -> Snapshot:
    """Its row is held: it is not deleted meanwhile."""
    ref = str(wanted.snapshot)
    column = Snapshot.id if is_id(ref, Kind.SNAPSHOT) else Snapshot.name
    query = select(Snapshot).where(column == ref, Snapshot.project_id == project_id)
    found = await session.scalar(query.with_for_update(key_share=True, read=True))
    if found is None:
        detail = f"no snapshot {ref}"
        raise VolumeSnapshotUnknown(detail, errors=(FieldError(pointer="/snapshot", detail=detail),))
    if found.state != "available":
        raise VolumeSnapshotNotReady(f"{found.name} is {found.state}")
    if "pool" in wanted.model_fields_set and wanted.pool != found.pool:
        detail = f"{found.name} lies in pool {found.pool}"
        raise VolumePoolDiffers(detail, errors=(FieldError(pointer="/pool", detail=detail),))
    return found


async def _host_id(session: AsyncSession, actor: Actor, ref: str) -> str:
    if not ref:
        return ""
    if not actor.is_operator:
        raise VolumeHostForbidden("the host is the operator's to choose")
    column: ColumnElement[Any] = Host.id.expression if is_id(ref, Kind.HOST) else Host.name.expression
    found = await session.scalar(select(Host.id).where(column == ref, Host.state == "ready"))
    if found is None:
        raise VolumeHostUnknown(f"no host {ref}", errors=(FieldError(pointer="/host", detail=f"no host {ref}"),))
    return found
