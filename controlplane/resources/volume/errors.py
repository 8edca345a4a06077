"""What can go wrong with volumes."""

from __future__ import annotations

from controlplane.core.errors import Conflict, Forbidden, InvalidInput, NotFound


class VolumeNotFound(NotFound):
    """There is no volume with this name or id in the project."""

    code = "volume.not_found"
    title = "No such volume"


class VolumeNameTaken(Conflict):
    """The project has a volume of this name already; one that is being deleted or retained counts until it is gone."""

    code = "volume.name_taken"
    title = "The name is taken"
    constraint = "volume_project_id_name_idx"


class VolumeProtected(Conflict):
    """The volume is protected from deletion; set `is_protected` to false first."""

    code = "volume.protected"
    title = "The volume is protected"


class VolumeDeleting(Conflict):
    """The volume is deleted, or is just being; one that is retained can be restored."""

    code = "volume.deleting"
    title = "The volume is deleted"


class VolumeNotRetained(Conflict):
    """Only a deleted volume whose data is still kept can be restored."""

    code = "volume.not_retained"
    title = "There is nothing to restore"


class VolumeNotReady(Conflict):
    """The volume is not made yet; wait until it is available."""

    code = "volume.not_ready"
    title = "The volume is not available"


class VolumeInUse(Conflict):
    """A machine has the volume; detach it first."""

    code = "volume.in_use"
    title = "A machine has the volume"


class VolumeAttached(Conflict):
    """The volume is attached already; a volume is in one machine at a time."""

    code = "volume.attached"
    title = "The volume is attached already"


class VolumeNotAttached(Conflict):
    """The volume is in no machine."""

    code = "volume.not_attached"
    title = "The volume is not attached"


class VolumeIsRoot(Conflict):
    """It is the root disk of a machine, with which it is made and goes."""

    code = "volume.is_root"
    title = "It is a root disk"


class VolumeHostDiffers(Conflict):
    """Volume and machine are on different hosts; `context` names them. Make the machine where the volume is
    (`volumes` of the VM), or a copy of the volume.
    """

    code = "volume.host_differs"
    title = "The machine is on another host"


class VolumeVmUnknown(InvalidInput):
    """There is no VM with this name or id in the project."""

    code = "volume.vm_unknown"
    title = "No such VM"


class VolumeVmDeleting(Conflict):
    """The machine is being deleted; nothing can be attached to it any more."""

    code = "volume.vm_deleting"
    title = "The VM is being deleted"


class VolumeVmFailed(Conflict):
    """The machine has failed and waits for an operator (`context.cause`): what is attached would never reach it. Detaching is
    possible, and has it try again.
    """

    code = "volume.vm_failed"
    title = "The VM has failed"


class VolumeVmFull(Conflict):
    """A machine has at most 16 volumes."""

    code = "volume.vm_full"
    title = "The VM has all volumes it may have"


class VolumeImageUnknown(InvalidInput):
    """There is no image with this name or id, or it is none that disks begin as."""

    code = "volume.image_unknown"
    title = "No such image"


class VolumeSnapshotUnknown(InvalidInput):
    """There is no snapshot with this name or id in the project."""

    code = "volume.snapshot_unknown"
    title = "No such snapshot"


class VolumeSnapshotNotReady(Conflict):
    """The snapshot is not taken yet, or is being deleted."""

    code = "volume.snapshot_not_ready"
    title = "The snapshot is not available"


class VolumeUnknown(InvalidInput):
    """There is no volume with this name or id in the project."""

    code = "volume.unknown"
    title = "No such volume"


class VolumePoolUnknown(InvalidInput):
    """No host, or not the one that was meant, has a storage pool of this name."""

    code = "volume.pool_unknown"
    title = "No such storage pool"


class VolumePoolDiffers(InvalidInput):
    """A clone lies in the pool, and on the host, of its snapshot."""

    code = "volume.pool_differs"
    title = "The snapshot lies elsewhere"


class VolumeTooSmall(InvalidInput):
    """The volume is smaller than the image or snapshot that it begins as."""

    code = "volume.too_small"
    title = "The volume is too small"


class VolumeShrinkRefused(InvalidInput):
    """Volumes only grow: what lies beyond the new end would be lost."""

    code = "volume.shrink_refused"
    title = "Volumes do not shrink"


class VolumeLimitsInvalid(InvalidInput):
    """The limits contradict each other, or are finer than the host's storage backend can hold."""

    code = "volume.limits_invalid"
    title = "The limits are not valid"


class VolumeHostForbidden(Forbidden):
    """Only operators may choose the host."""

    code = "volume.host_forbidden"
    title = "Choosing the host is not allowed"


class VolumeHostUnknown(InvalidInput):
    """There is no host with this name or id."""

    code = "volume.host_unknown"
    title = "No such host"


class VolumeLimitReached(Conflict):
    """The project has as many volumes as one may have (`limits.volumes`)."""

    code = "volume.limit_reached"
    title = "Too many volumes"
