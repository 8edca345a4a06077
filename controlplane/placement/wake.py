"""Telling those who wait that there may be room again. The one rule: it is a nudge; each asks anew and may wait on."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.kernel import service as kernel
from controlplane.models.vm import Vm

MAX_WOKEN = 64


async def wake_waiting(session: AsyncSession) -> int:
    """Nudge the VMs that have waited longest; returns how many. The others look by themselves every 15 s."""
    waiting = await session.scalars(select(Vm.id).where(Vm.state == "waiting").order_by(Vm.created_at).limit(MAX_WOKEN))
    woken = 0
    for vm_id in waiting:
        woken += await kernel.signal(session, "vm", vm_id, "capacity") is not None
    return woken
