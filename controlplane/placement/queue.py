"""Who waited first gets room first. The one rule: nobody takes room that a machine which asked earlier could take as well.

A machine is ahead of another when it waits, asked earlier, and fits wherever the other fits: no larger, and bound by nothing
that does not bind the other too. Larger ones do not hold back smaller ones.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.kernel import service as kernel
from controlplane.models.image import Image
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.placement.request import PlacementRequest


async def count_ahead(session: AsyncSession, vm: Vm, request: PlacementRequest) -> int:
    """How many machines are ahead of this one. Those whose run is parked wait for a person, not for room."""
    is_parked = select(Run.id).where(Run.program == "vm", Run.subject == Vm.id, Run.parked_at.is_not(None)).exists()
    query = (
        select(func.count())
        .select_from(Vm)
        .join(Image, Image.id == Vm.image_id)
        .where(Vm.state == "waiting", Vm.id != vm.id, tuple_(Vm.created_at, Vm.id) < tuple_(vm.created_at, vm.id))
        .where(Vm.vcpus <= request.vcpus, Vm.memory_bytes <= request.memory_bytes, Vm.isolation == request.isolation)
        .where(Image.architecture == request.architecture)
        .where(_text("host").in_(["", request.host]), _text("location").in_(["", request.location]))
        .where(func.coalesce(Vm.placement["labels"], func.jsonb_build_object()).contained_by(dict(request.labels)), ~is_parked)
    )
    return await session.scalar(query) or 0


async def wake_next(session: AsyncSession) -> None:
    """Nudge the machine that waits longest: somebody before it was served, and there may be room for it too."""
    oldest = select(Vm.id).where(Vm.state == "waiting").order_by(Vm.created_at, Vm.id).limit(1)
    if (vm_id := await session.scalar(oldest)) is not None:
        await kernel.signal(session, "vm", vm_id, "capacity")


def _text(name: str) -> ColumnElement[str]:
    return func.coalesce(Vm.placement[name].astext, "")
