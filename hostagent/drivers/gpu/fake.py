"""GPUs by name, handed over by a flag."""

from __future__ import annotations

import dataclasses

from hostagent.drivers.fault import Faults
from hostagent.drivers.gpu.protocol import GpuObserved, GpuPlan, GpuRendered, GpuTraits


class FakeGpu:
    traits = GpuTraits(name="fake", hands_over="passthrough")

    def __init__(self, bdfs: tuple[str, ...] = (), faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.gpus = {bdf: GpuObserved(bdf=bdf, state="with_host", driver="fake") for bdf in bdfs}

    def render(self, plan: GpuPlan) -> GpuRendered:
        return GpuRendered(writes=tuple((f"/sys/bus/pci/devices/{bdf}/driver_override", "vfio-pci") for bdf in plan.group_bdfs))

    async def observe(self, bdf: str) -> GpuObserved | None:
        await self.faults.reach("gpu.observe", bdf)
        return self.gpus.get(bdf)

    async def apply(self, plan: GpuPlan) -> GpuObserved:
        await self.faults.reach("gpu.apply", plan.bdf)
        self.gpus[plan.bdf] = dataclasses.replace(self.gpus[plan.bdf], state="handed_over", driver="vfio-pci")
        return self.gpus[plan.bdf]

    async def remove(self, bdf: str) -> None:
        await self.faults.reach("gpu.remove", bdf)
        if bdf in self.gpus:
            self.gpus[bdf] = dataclasses.replace(self.gpus[bdf], state="with_host", driver="fake")
