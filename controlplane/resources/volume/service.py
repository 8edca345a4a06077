"""Making and removing disks' rows. The one rule: a boot volume's row goes only after the disk is gone from its host."""

from __future__ import annotations

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.models.volume import Volume


async def create_boot_volume(
    session: AsyncSession, *, project_id: str, owner_id: str, image_id: str, size_bytes: int
) -> Volume:
    """The root disk of a machine; its name is its id, so it never takes a name that a person may want."""
    volume_id = new_id(Kind.VOLUME)
    volume = Volume(
        id=volume_id,
        project_id=project_id,
        name=volume_id.replace("_", "-"),
        size_bytes=size_bytes,
        image_id=image_id,
        owner_id=owner_id,
        is_boot=True,
    )
    session.add(volume)
    await session.flush()
    return volume


async def remove_boot_volumes(session: AsyncSession, owner_id: str) -> None:
    await session.execute(delete(Volume).where(Volume.owner_id == owner_id, Volume.is_boot))
