"""What can go wrong with images."""

from __future__ import annotations

from controlplane.core.errors import BedplateError, Conflict, Forbidden, InvalidInput, NotFound


class ImageNotFound(NotFound):
    """There is no image with this name or id."""

    code = "image.not_found"
    title = "No such image"


class ImageNameTaken(Conflict):
    """The deployment has an image of this name already."""

    code = "image.name_taken"
    title = "The name is taken"
    constraint = "image_name_key"


class ImageInUse(Conflict):
    """VMs, volumes, models or endpoints still stand on the image; the detail names one. Delete them first."""

    code = "image.in_use"
    title = "The image is in use"


class ImageNotAvailable(Conflict):
    """Some of the image's files were not uploaded yet, or the image is being deleted."""

    code = "image.not_available"
    title = "The image cannot be used now"


class ImageManifestInvalid(InvalidInput):
    """The manifest contradicts itself or the directory; `errors` and the detail say where."""

    code = "image.manifest_invalid"
    title = "The manifest is not valid"


class ImageSourceForbidden(Forbidden):
    """A directory of the server can be imported only where API and operator share one machine; upload the files instead."""

    code = "image.source_forbidden"
    title = "Importing a directory of the server is not allowed here"


class BlobUnknown(NotFound):
    """No file of the image has this digest."""

    code = "image.blob_unknown"
    title = "The image has no such file"


class BlobMismatch(InvalidInput):
    """The bytes that arrived do not have the size or the digest that the manifest states; nothing was kept."""

    code = "image.blob_mismatch"
    title = "The bytes do not match the manifest"


class ImageStoreFull(BedplateError):
    """The control plane's disk has no room for the file; make room in its state directory and try again."""

    code = "image.store_full"
    status = 507
    title = "The image store is full"


class BlobBeingRemoved(Conflict):
    """The same content is just being removed with an image that was deleted. It takes seconds: send it again."""

    code = "image.blob_being_removed"
    title = "The file is being removed"
