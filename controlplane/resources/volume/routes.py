"""Volumes over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.volume import Volume
from controlplane.resources.image.errors import ImageNotAvailable
from controlplane.resources.quota.errors import QuotaExceeded
from controlplane.resources.snapshot import queries as snapshot_queries
from controlplane.resources.snapshot import service as snapshots
from controlplane.resources.snapshot.errors import SnapshotLimitReached, SnapshotNameTaken, SnapshotVolumeNotReady
from controlplane.resources.snapshot.queries import ShownSnapshot
from controlplane.resources.snapshot.schemas import SnapshotTake, SnapshotView
from controlplane.resources.storage_pool.errors import StoragePoolNoSpace
from controlplane.resources.volume import queries, service
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
    VolumeNameTaken,
    VolumeNotAttached,
    VolumeNotFound,
    VolumeNotReady,
    VolumeNotRetained,
    VolumePoolDiffers,
    VolumePoolUnknown,
    VolumeProtected,
    VolumeShrinkRefused,
    VolumeSnapshotNotReady,
    VolumeSnapshotUnknown,
    VolumeTooSmall,
    VolumeVmDeleting,
    VolumeVmFailed,
    VolumeVmFull,
    VolumeVmUnknown,
)
from controlplane.resources.volume.queries import ShownVolume
from controlplane.resources.volume.schemas import VolumeAttach, VolumeCreate, VolumeGrow, VolumeUpdate, VolumeView

noun = Noun("volume", "volumes")
router = noun.router


@noun.create(
    VolumeView,
    errors=[
        QuotaExceeded,
        VolumeNameTaken,
        VolumeLimitReached,
        VolumeImageUnknown,
        ImageNotAvailable,
        VolumeSnapshotUnknown,
        VolumeSnapshotNotReady,
        VolumePoolUnknown,
        VolumePoolDiffers,
        VolumeTooSmall,
        VolumeLimitsInvalid,
        VolumeVmUnknown,
        VolumeVmDeleting,
        VolumeVmFailed,
        VolumeVmFull,
        VolumeHostDiffers,
        VolumeHostForbidden,
        VolumeHostUnknown,
        StoragePoolNoSpace,
    ],
)
async def create(call: Call, body: VolumeCreate) -> ShownVolume:
    """Make a volume, encrypted under a key of its own: its room is taken at once, or nothing is made and 507 says why."""
    most = call.services.settings.limits.volumes
    row = await service.create(call.session, call.project_id, call.actor, body, most=most)
    call.subject = row
    return await queries.show(call.session, row)


@noun.list(VolumeView)
async def list_(call: Call, page: Page) -> PageOf[ShownVolume]:
    """List the volumes of a project, root disks of its VMs among them."""
    found = await call.page(
        Volume,
        page,
        Volume.owner_id.is_(None),
        fields=["state", "vm_id", "host_id", "size_bytes", "pool", "is_boot", "observed_state", "image_id", "snapshot_id"],
    )
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(VolumeView, errors=[VolumeNotFound])
async def show(call: Call, volume: Ref) -> ShownVolume:
    """Show one volume."""
    return await queries.show(call.session, await call.load(Volume, volume))


@noun.update(VolumeView, errors=[VolumeNotFound, VolumeDeleting, VolumeLimitsInvalid])
async def update(call: Call, volume: Ref, body: VolumeUpdate) -> ShownVolume:
    """Change the fields that are sent; limits hold at once."""
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.update(call.session, row, body)
    return answer


@noun.action(
    "attach",
    VolumeView,
    errors=[
        VolumeNotFound,
        VolumeDeleting,
        VolumeNotReady,
        VolumeAttached,
        VolumeVmUnknown,
        VolumeVmDeleting,
        VolumeVmFailed,
        VolumeVmFull,
        VolumeHostDiffers,
    ],
)
async def attach(call: Call, volume: Ref, body: VolumeAttach) -> ShownVolume:
    """Put it into a VM of its host; a running one gets it at once where its hypervisor can."""
    vm = await service.machine_named(call.session, call.project_id, body.vm)
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.attach(call.session, row, vm, body)
    return answer


@noun.action("detach", VolumeView, errors=[VolumeNotFound, VolumeNotAttached, VolumeIsRoot, StoragePoolNoSpace])
async def detach(call: Call, volume: Ref) -> ShownVolume:
    """Take it out of its VM. Unmount it there first: the guest may refuse to let it go."""
    vm = await service.lock_machine_of(call.session, call.project_id, volume)
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.detach(call.session, row, vm)
    return answer


@noun.action(
    "grow",
    VolumeView,
    errors=[VolumeNotFound, VolumeDeleting, VolumeNotReady, VolumeShrinkRefused, StoragePoolNoSpace, QuotaExceeded],
)
async def grow(call: Call, volume: Ref, body: VolumeGrow) -> ShownVolume:
    """Make it larger. `takes_effect` says when a running VM sees it: now, or after its restart."""
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.grow(call.session, row, body.size_bytes)
    return answer


@noun.action(
    "snapshot",
    SnapshotView,
    errors=[VolumeNotFound, SnapshotNameTaken, SnapshotVolumeNotReady, SnapshotLimitReached, StoragePoolNoSpace],
)
async def snapshot(call: Call, volume: Ref, body: SnapshotTake) -> ShownSnapshot:
    """Take a snapshot of it as it is now; the same as making one under `snapshots`."""
    row = await _own(call, volume)
    taken = await snapshots.take(call.session, row, body, most=call.services.settings.limits.snapshots)
    call.subject, call.before = taken, None
    return await snapshot_queries.show(call.session, taken)


@noun.action("restore", VolumeView, errors=[VolumeNotFound, VolumeNotRetained])
async def restore(call: Call, volume: Ref) -> ShownVolume:
    """Bring a deleted volume back while its data is retained."""
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.restore(call.session, row)
    return answer


@noun.delete(VolumeView, errors=[VolumeInUse, VolumeIsRoot, VolumeProtected])
async def delete(call: Call, volume: Ref) -> ShownVolume:
    """Delete it: its key is destroyed, which makes its data noise. With `retention_hours` it is kept that long first."""
    row = await _own(call, volume)
    answer = await queries.show(call.session, row)
    await service.remove(call.session, row)
    return answer


async def _own(call: Call, ref: str) -> Volume:
    """The tenant's volume: a replica's is changed with its endpoint alone."""
    row = await call.load(Volume, ref)
    if row.owner_id is not None:
        raise VolumeNotFound(f"no volume {ref}")
    return row
