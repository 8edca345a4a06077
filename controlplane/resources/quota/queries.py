"""What a project has. The one rule: it is counted from the rows themselves, so nothing can drift from them."""

from __future__ import annotations

from sqlalchemy import func, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.vm import Vm
from controlplane.models.volume import Volume

RESOURCES = ("vms", "vcpus", "memory_bytes", "volumes", "disk_bytes")


async def usage(session: AsyncSession, project_id: str) -> dict[str, int]:
    """By resource, what is being deleted included until it is gone. In one statement."""
    vms = (
        select(
            func.count().label("vms"),
            func.coalesce(func.sum(Vm.vcpus), 0).label("vcpus"),
            func.coalesce(func.sum(Vm.memory_bytes), 0).label("memory_bytes"),
        )
        .where(Vm.project_id == project_id)
        .subquery()
    )
    volumes = (
        select(func.count().label("volumes"), func.coalesce(func.sum(Volume.size_bytes), 0).label("disk_bytes"))
        .where(Volume.project_id == project_id)
        .subquery()
    )
    row = (await session.execute(select(vms, volumes).select_from(vms.join(volumes, true())))).one()
    return {name: int(getattr(row, name)) for name in RESOURCES}
