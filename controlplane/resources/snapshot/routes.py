"""Snapshots over HTTP."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.snapshot import Snapshot
from controlplane.resources.snapshot import queries, service
from controlplane.resources.snapshot.errors import (
    SnapshotDeleting,
    SnapshotHasClones,
    SnapshotLimitReached,
    SnapshotNameTaken,
    SnapshotNotFound,
    SnapshotProtected,
    SnapshotVolumeNotReady,
    SnapshotVolumeUnknown,
)
from controlplane.resources.snapshot.queries import ShownSnapshot
from controlplane.resources.snapshot.schemas import SnapshotCreate, SnapshotUpdate, SnapshotView
from controlplane.resources.storage_pool.errors import StoragePoolNoSpace

noun = Noun("snapshot", "snapshots")
router = noun.router


@noun.create(
    SnapshotView,
    errors=[SnapshotNameTaken, SnapshotVolumeUnknown, SnapshotVolumeNotReady, SnapshotLimitReached, StoragePoolNoSpace],
)
async def create(call: Call, body: SnapshotCreate) -> ShownSnapshot:
    """Take a snapshot of a volume, also of one whose machine runs: the machine goes on."""
    volume = await service.volume_named(call.session, call.project_id, body.volume)
    row = await service.take(call.session, volume, body, most=call.services.settings.limits.snapshots)
    call.subject = row
    return await queries.show(call.session, row)


@noun.list(SnapshotView)
async def list_(call: Call, page: Page) -> PageOf[ShownSnapshot]:
    """List the snapshots of a project."""
    found = await call.page(Snapshot, page, fields=["state", "volume_id", "size_bytes", "host_id", "pool"])
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(SnapshotView, errors=[SnapshotNotFound])
async def show(call: Call, snapshot: Ref) -> ShownSnapshot:
    """Show one snapshot."""
    return await queries.show(call.session, await call.load(Snapshot, snapshot))


@noun.update(SnapshotView, errors=[SnapshotNotFound, SnapshotDeleting])
async def update(call: Call, snapshot: Ref, body: SnapshotUpdate) -> ShownSnapshot:
    """Change the fields that are sent."""
    row = await call.load(Snapshot, snapshot)
    answer = await queries.show(call.session, row)
    await service.update(call.session, row, body)
    return answer


@noun.delete(SnapshotView, errors=[SnapshotProtected, SnapshotHasClones])
async def delete(call: Call, snapshot: Ref) -> ShownSnapshot:
    """Delete it. Volumes that began as it must be gone."""
    row = await call.load(Snapshot, snapshot)
    answer = await queries.show(call.session, row)
    await service.remove(call.session, row)
    return answer
