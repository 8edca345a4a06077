"""`/v1/storage-pools`: for operators."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.core.ids import is_id
from controlplane.models.storage_pool import StoragePool
from controlplane.resources.storage_pool import queries, service
from controlplane.resources.storage_pool.errors import StoragePoolNotFound
from controlplane.resources.storage_pool.queries import Reclaimable, ShownPool
from controlplane.resources.storage_pool.schemas import ReclaimView, StoragePoolReclaim, StoragePoolView

noun = Noun("storage_pool", "storage-pools", in_project=False, has_operations=False)
router = noun.router


@noun.list(StoragePoolView)
async def list_(call: Call, page: Page) -> PageOf[ShownPool]:
    """List the storage pools of all hosts."""
    found = await call.page(
        StoragePool, page, fields=["host_id", "is_available", "free_bytes", "total_bytes", "reserved_bytes"]
    )
    return PageOf(items=[*await queries.shown(call.session, found.items)], next_page_token=found.next_page_token)


@noun.show(StoragePoolView, errors=[StoragePoolNotFound])
async def show(call: Call, storage_pool: Ref) -> ShownPool:
    """Show one storage pool, by its id: names are those of each host."""
    if not is_id(storage_pool):
        raise StoragePoolNotFound(f"{storage_pool} is no id of a storage pool")
    (one,) = await queries.shown(call.session, [await call.load(StoragePool, storage_pool)])
    return one


@noun.route("POST", "/{storage_pool}/reclaim", "reclaim", ReclaimView, errors=[StoragePoolNotFound])
async def reclaim(call: Call, storage_pool: Ref, body: StoragePoolReclaim) -> Reclaimable:
    """End deleted volumes whose data is only retained, to make room; a dry run says what that frees, and what holds most."""
    if not is_id(storage_pool):
        raise StoragePoolNotFound(f"{storage_pool} is no id of a storage pool")
    pool = await call.load(StoragePool, storage_pool)
    found = await queries.reclaimable(call.session, pool, dry_run=body.dry_run)
    if not body.dry_run:
        await service.end_retained(call.session, pool)
    return found
