"""Storage that keeps a sparse file per volume and serves nothing."""

from __future__ import annotations

from pathlib import Path

from hostagent.drivers.fault import Faults
from hostagent.drivers.storage.protocol import StorageTraits, VolumeObserved, VolumePlan, VolumeRendered
from hostagent.protocol.errors import AgentError


class FakeStorage:
    traits = StorageTraits(name="fake", transports=frozenset({"vhost_user_blk", "file"}))

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.volumes: dict[str, VolumeObserved] = {}
        self._files: dict[str, Path] = {}

    def render(self, plan: VolumePlan) -> VolumeRendered:
        create = ("truncate", "--size", str(plan.volume.size_bytes), str(plan.directory / "disk.raw"))
        return VolumeRendered(create=(create,), unit=None)

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        await self.faults.reach("storage.observe", volume_id)
        return self.volumes.get(volume_id)

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        await self.faults.reach("storage.apply", plan.volume.id)
        if plan.base is not None and not plan.base.exists():
            raise AgentError("volume.base_missing", f"the base image {plan.base.name} is not here", retryable=False)
        found = self.volumes.get(plan.volume.id)
        if found is not None and plan.volume.size_bytes < found.size_bytes:
            raise AgentError("volume.shrink_refused", "a volume never shrinks", retryable=False)
        plan.directory.mkdir(parents=True, exist_ok=True)
        path = plan.directory / "disk.raw"
        with path.open("ab") as file:
            file.truncate(plan.volume.size_bytes)
        self._files[plan.volume.id] = path
        self.volumes[plan.volume.id] = VolumeObserved(
            volume_id=plan.volume.id,
            state="exported",
            size_bytes=plan.volume.size_bytes,
            transport=plan.transport,
            path=path if plan.transport == "file" else plan.run_directory / "disk.sock",
        )
        return self.volumes[plan.volume.id]

    async def remove(self, volume_id: str) -> None:
        await self.faults.reach("storage.remove", volume_id)
        self.volumes.pop(volume_id, None)
        path = self._files.pop(volume_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    async def volume_ids(self) -> tuple[str, ...]:
        return tuple(self.volumes)
