"""What can go wrong with snapshots."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class SnapshotNotFound(NotFound):
    """There is no snapshot with this name or id in the project."""

    code = "snapshot.not_found"
    title = "No such snapshot"


class SnapshotNameTaken(Conflict):
    """The project has a snapshot of this name already; one that is being deleted counts until it is gone."""

    code = "snapshot.name_taken"
    title = "The name is taken"
    constraint = "snapshot_project_id_name_idx"


class SnapshotVolumeUnknown(InvalidInput):
    """There is no volume with this name or id in the project."""

    code = "snapshot.volume_unknown"
    title = "No such volume"


class SnapshotVolumeNotReady(Conflict):
    """The volume holds nothing yet, or is being deleted: only one that is available can be snapshotted."""

    code = "snapshot.volume_not_ready"
    title = "The volume is not available"


class SnapshotProtected(Conflict):
    """The snapshot is protected from deletion; set `is_protected` to false first."""

    code = "snapshot.protected"
    title = "The snapshot is protected"


class SnapshotHasClones(Conflict):
    """Volumes began as this snapshot and still stand on it; `context` names them. Delete them first."""

    code = "snapshot.has_clones"
    title = "Volumes stand on the snapshot"


class SnapshotDeleting(Conflict):
    """The snapshot is being deleted; nothing about it can be changed any more."""

    code = "snapshot.deleting"
    title = "The snapshot is being deleted"


class SnapshotLimitReached(Conflict):
    """The project has as many snapshots as one may have (`limits.snapshots`)."""

    code = "snapshot.limit_reached"
    title = "Too many snapshots"
