"""The row of a copy. The one rule: made in a transaction, before its run is spawned, so both are made once."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.models.image import ImageCopy


async def copy_on(session: AsyncSession, *, image_id: str, host_id: str) -> str:
    """The id of the copy of this image on this host, made when there is none."""
    values = {"id": new_id(Kind.IMAGE_COPY), "image_id": image_id, "host_id": host_id}
    await session.execute(insert(ImageCopy).values(**values).on_conflict_do_nothing())
    query = select(ImageCopy.id).where(ImageCopy.image_id == image_id, ImageCopy.host_id == host_id)
    return (await session.scalars(query)).one()
