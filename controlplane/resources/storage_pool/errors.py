"""What can go wrong with storage pools."""

from __future__ import annotations

from controlplane.core.errors import NoCapacity, NotFound


class StoragePoolNotFound(NotFound):
    """There is no storage pool with this id; `bedplate storage-pool list` shows them."""

    code = "storage_pool.not_found"
    title = "No such storage pool"


class StoragePoolNoSpace(NoCapacity):
    """No pool of this name has that much room; `context` says how much there is. Nothing was made. Delete volumes or snapshots,
    add a disk, or ask for less.
    """

    code = "storage_pool.no_space"
