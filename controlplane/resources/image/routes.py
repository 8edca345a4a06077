"""Images over HTTP. Reading is for everyone with a token; making and deleting them is the operator's."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

from fastapi import Path as PathParameter
from fastapi import Request
from sqlalchemy import select

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref, RequestContext
from controlplane.models.image import Image, ImageFile
from controlplane.resources.image import queries, service
from controlplane.resources.image.errors import (
    BlobBeingRemoved,
    BlobMismatch,
    BlobUnknown,
    ImageInUse,
    ImageManifestInvalid,
    ImageNameTaken,
    ImageNotFound,
    ImageSourceForbidden,
    ImageStoreFull,
)
from controlplane.resources.image.queries import ShownImage
from controlplane.resources.image.schemas import BlobView, ImageCreate, ImageView
from controlplane.resources.image.store import ImageStore

noun = Noun("image", "images", in_project=False, has_operations=False)
router = noun.router
Digest = Annotated[str, PathParameter(description="SHA-256 of the file.", examples=["0" * 64], pattern="^[0-9a-f]{64}$")]


@noun.create(ImageView, errors=[ImageNameTaken, ImageManifestInvalid, ImageSourceForbidden, ImageStoreFull, BlobBeingRemoved])
async def create(body: ImageCreate, *, call: Call) -> ShownImage:
    """Make an image of a manifest. Its files are uploaded next, unless `source` names a directory that has them."""
    if body.source is not None:
        _require_one_machine(call)
        store = ImageStore(call.services.settings.state_dir)
        async with call.outside():
            manifest = await service.take_directory(store, Path(body.source.directory))
        image = await service.create_of_stored(call.session, manifest, name=body.name)
    else:
        assert body.manifest is not None
        image = await service.create(call.session, body.manifest, name=body.name)
    call.subject = image
    return await queries.show(call.session, image)


def _require_one_machine(call: RequestContext) -> None:
    host = call.services.settings.api.listen.rpartition(":")[0].strip("[]")
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ImageSourceForbidden("the API listens on other addresses than loopback: upload the files instead")


@noun.list(ImageView)
async def list_images(page: Page, *, call: Call) -> PageOf[ShownImage]:
    """The images of the deployment."""
    found = await call.page(Image, page, fields=["state", "architecture", "os"])
    return PageOf(items=await queries.shown(call.session, found.items), next_page_token=found.next_page_token)


@noun.show(ImageView, errors=[ImageNotFound])
async def show(image: Ref, *, call: Call) -> ShownImage:
    """One image with its files."""
    return await queries.show(call.session, await call.load(Image, image))


@noun.route(
    "PUT",
    "/{image}/blobs/{sha256}",
    "upload",
    BlobView,
    errors=[ImageNotFound, BlobUnknown, BlobMismatch, BlobBeingRemoved, ImageStoreFull],
    accepts="application/octet-stream",
)
async def upload(image: Ref, sha256: Digest, request: Request, *, call: Call) -> BlobView:
    """Store one file of the manifest: its raw bytes. Storing it again is quick success."""
    row = await call.load(Image, image)
    file = await call.session.scalar(select(ImageFile).where(ImageFile.image_id == row.id, ImageFile.sha256 == sha256).limit(1))
    if file is None:
        raise BlobUnknown(f"no file of {row.name} has sha256 {sha256}")
    await call.release()
    store = ImageStore(call.services.settings.state_dir)
    if not store.has(sha256, file.size_bytes):
        await store.write(request.stream(), sha256=sha256, size_bytes=file.size_bytes)
    row = await call.load(Image, row.id)
    await service.record_blob(call.session, sha256, file.size_bytes)
    await service.settle(call.session, row)
    return BlobView(sha256=sha256, size_bytes=file.size_bytes, image_state=row.state)


@noun.delete(ImageView, errors=[ImageInUse])
async def delete(image: Ref, *, call: Call) -> ShownImage:
    """Delete an image that nothing stands on: first its copies on hosts, then the image."""
    row = await call.load(Image, image)
    await service.remove(call.session, row)
    return await queries.show(call.session, row)
