"""Changes of images. The one rule: an image becomes available in the transaction that records its last blob."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pydantic import ValidationError
from sqlalchemy import ColumnElement, and_, exists, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import EndpointRevision
from controlplane.models.image import Blob, Image, ImageFile
from controlplane.models.model import Model
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.image.errors import BlobBeingRemoved, ImageInUse, ImageManifestInvalid
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.image.store import ImageStore

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 20


async def read_manifest(directory: Path) -> ImageManifest:
    """The manifest of a directory on this machine; raises ImageManifestInvalid."""
    path = directory / MANIFEST
    try:
        content = await asyncio.to_thread(path.read_bytes)
    except OSError as error:
        raise ImageManifestInvalid(f"{path} cannot be read: {error.strerror}", errors=_at_directory("not readable")) from error
    if len(content) > MAX_MANIFEST_BYTES:
        raise ImageManifestInvalid(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes", errors=_at_directory("too large"))
    try:
        return ImageManifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = "/".join(str(part) for part in first["loc"])
        raise ImageManifestInvalid(f"{path}: {where}: {first['msg']}", errors=_at_directory(str(first["msg"]))) from error


def _at_directory(detail: str) -> tuple[FieldError, ...]:
    return (FieldError(pointer="/source/directory", detail=detail),)


async def create(session: AsyncSession, manifest: ImageManifest, *, name: str | None = None) -> Image:
    """Write the row and its files; blobs that the store has already count at once."""
    image = Image(
        id=new_id(Kind.IMAGE),
        name=name or manifest.name,
        description=manifest.description,
        architecture=manifest.architecture,
        os=manifest.os,
        default_user=manifest.default_user,
        boot=manifest.boot.model_dump(),
        root_file=manifest.root_file,
        min_disk_bytes=manifest.min_disk_bytes,
        min_memory_bytes=manifest.min_memory_bytes,
        runs_workloads=manifest.runs_workloads,
    )
    session.add(image)
    await session.flush()
    for file in manifest.files:
        values = {"name": file.name, "sha256": file.sha256, "size_bytes": file.size_bytes, "url": file.url}
        session.add(ImageFile(image_id=image.id, **values))
    await session.flush()
    await settle(session, image)
    if image.state == "uploading" and any(file.url for file in manifest.files):
        await kernel.start(session, "image", image.id)
    return image


async def take_directory(store: ImageStore, directory: Path) -> ImageManifest:
    """Copy a manifest's files into the store. It takes long and touches no row: no transaction may be open meanwhile."""
    manifest = await read_manifest(directory)
    for file in manifest.files:
        path = directory / file.name
        if not await asyncio.to_thread(path.is_file):
            raise ImageManifestInvalid(f"{path} does not exist", errors=_at_directory(f"{file.name} is missing"))
        if not store.has(file.sha256, file.size_bytes):
            await store.take_file(path, sha256=file.sha256, size_bytes=file.size_bytes)
    return manifest


async def create_of_stored(session: AsyncSession, manifest: ImageManifest, *, name: str | None = None) -> Image:
    """An available image of files that `take_directory` has brought into the store."""
    image = await create(session, manifest, name=name)
    for file in sorted(manifest.files, key=lambda file: file.sha256):
        await record_blob(session, file.sha256, file.size_bytes)
    await settle(session, image)
    return image


async def record_blob(session: AsyncSession, sha256: str, size_bytes: int) -> None:
    """The store has it now. Recording it twice is once. Raises BlobBeingRemoved: then the store does not keep it."""
    values = {"sha256": sha256, "size_bytes": size_bytes, "stored_at": func.now()}
    await session.execute(insert(Blob).values(**values).on_conflict_do_nothing())
    if await session.scalar(select(Blob.removing_at).where(Blob.sha256 == sha256).with_for_update(read=True)):
        raise BlobBeingRemoved(f"{sha256} is just being removed with the last image that had it")


async def settle(session: AsyncSession, image: Image) -> None:
    """Make the image available when no blob is missing any more. It holds the blobs' rows: none is removed meanwhile."""
    wanted = set(await session.scalars(select(ImageFile.sha256).where(ImageFile.image_id == image.id)))
    kept = select(Blob.sha256).where(Blob.sha256.in_(wanted), Blob.removing_at.is_(None)).order_by(Blob.sha256)
    missing = wanted - set(await session.scalars(kept.with_for_update(read=True)))
    await session.execute(
        update(Image)
        .where(Image.id == image.id, Image.state == "uploading", literal(not missing))
        .values(state="available", available_at=func.now(), observed_generation=Image.generation)
        .execution_options(synchronize_session=False)
    )
    await session.refresh(image)


def _users(image_id: str) -> tuple[tuple[str, ColumnElement[bool]], ...]:
    """Who may stand on an image: machines and disks, models that were imported, endpoints that may make replicas of it."""
    mounted = Vm.workload["mounts"].contains([{"image_id": image_id}])
    spec = Endpoint.spec
    names = ("guest_image_id", "engine_image_id", "weights_image_id")
    frozen = (spec[name].as_string() == image_id for name in names)
    going_back = and_(
        or_(*(EndpointRevision.spec[name].as_string() == image_id for name in names)),
        EndpointRevision.endpoint_id == Endpoint.id,
        EndpointRevision.number == Endpoint.rollout["from_revision"].as_integer(),
    )
    return (
        ("vm", or_(Vm.image_id == image_id, Vm.workload["root_image_id"].as_string() == image_id, mounted)),
        ("volume", Volume.image_id == image_id),
        ("model", or_(Model.engine_image_id == image_id, Model.weights_image_id == image_id)),
        ("endpoint", or_(*frozen)),
        ("endpoint", going_back),
    )


async def remove(session: AsyncSession, image: Image) -> None:
    """Begin to delete: copies on hosts go first. Raises ImageInUse. Doing it twice is once."""
    if image.state == "deleting":
        return
    await session.refresh(image, with_for_update=True)  # what is being put into it commits first, or sees that it is gone
    for noun, uses in _users(image.id):
        if await session.scalar(select(exists().where(uses))):
            raise ImageInUse(f"{image.name} is used by a {noun}")
    await kernel.start(session, "image", image.id)
    await kernel.destroy(session, "image", image.id)
    image.state, image.deleting_at = "deleting", func.now()
