"""Reading images, in the form in which the API shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.image import Blob, Image, ImageCopy, ImageFile
from controlplane.models.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    name: str
    sha256: str
    size_bytes: int
    is_stored: bool
    url: str | None
    fetched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownImage:
    """An image with its files; other attributes are the row's, read when the answer is written."""

    row: Image
    files: Sequence[ShownFile]
    hosts: int
    run: Run | None

    @property
    def failure(self) -> str | None:
        return self.run.parked_detail if self.run is not None and self.run.parked_at is not None else None

    @property
    def last_error(self) -> str | None:
        return self.run.last_error if self.run is not None and self.run.parked_at is None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)


async def shown(session: AsyncSession, images: Iterable[Image]) -> list[ShownImage]:
    rows = list(images)
    ids = [row.id for row in rows]
    files = await session.execute(
        select(ImageFile, Blob.sha256.is_not(None))
        .outerjoin(Blob, and_(Blob.sha256 == ImageFile.sha256, Blob.removing_at.is_(None)))
        .where(ImageFile.image_id.in_(ids))
        .order_by(ImageFile.image_id, ImageFile.name)
    )
    by_image: dict[str, list[ShownFile]] = {}
    for file, is_stored in files:
        found = ShownFile(
            name=file.name,
            sha256=file.sha256,
            size_bytes=file.size_bytes,
            is_stored=is_stored,
            url=file.url,
            fetched_bytes=file.size_bytes if is_stored and file.url else file.fetched_bytes,
        )
        by_image.setdefault(file.image_id, []).append(found)
    copies = await session.execute(
        select(ImageCopy.image_id, func.count())
        .where(ImageCopy.image_id.in_(ids), ImageCopy.state == "present")
        .group_by(ImageCopy.image_id)
    )
    hosts = {row[0]: row[1] for row in copies}
    unfinished = select(Run).where(Run.program == "image", Run.subject.in_(ids), Run.finished_at.is_(None))
    runs = {run.subject: run for run in await session.scalars(unfinished.execution_options(populate_existing=True))}
    return [
        ShownImage(row=row, files=by_image.get(row.id, ()), hosts=hosts.get(row.id, 0), run=runs.get(row.id)) for row in rows
    ]


async def show(session: AsyncSession, image: Image) -> ShownImage:
    (one,) = await shown(session, [image])
    return one


async def files_of(session: AsyncSession, image_id: str) -> Sequence[ImageFile]:
    query = select(ImageFile).where(ImageFile.image_id == image_id).order_by(ImageFile.name)
    return list(await session.scalars(query))
