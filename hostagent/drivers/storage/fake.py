"""Storage that keeps a sparse file per volume and serves nothing."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from hostagent.drivers.fault import Faults
from hostagent.drivers.storage import layers
from hostagent.drivers.storage.protocol import Holders, StorageTraits, VolumeObserved, VolumePlan, VolumeRendered
from hostagent.lib import files
from hostagent.protocol.errors import AgentError

DISK = "disk.raw"


class FakeStorage:
    traits = StorageTraits(name="fake", transports=frozenset({"vhost_user_blk", "file"}), can_snapshot=True, can_encrypt=True)

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.volumes: dict[str, VolumeObserved] = {}
        self._files: dict[str, Path] = {}
        self._snapshots: dict[str, Path] = {}

    def render(self, plan: VolumePlan) -> VolumeRendered:
        create = ("truncate", "--size", str(plan.volume.size_bytes), str(plan.directory / DISK))
        return VolumeRendered(create=(create,), unit=None)

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        await self.faults.reach("storage.observe", volume_id)
        return self.volumes.get(volume_id)

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        await self.faults.reach("storage.apply", plan.volume.id)
        found = self.volumes.get(plan.volume.id)
        _check(plan, found)
        plan.directory.mkdir(parents=True, exist_ok=True)
        path = plan.directory / DISK
        if found is None and plan.source is not None:
            shutil.copyfile(plan.source / DISK, path)
        with path.open("ab") as file:
            file.truncate(plan.volume.size_bytes)
        self._files[plan.volume.id] = path
        is_encrypted = found.is_encrypted if found else plan.volume.id in plan.keys
        layers.write(plan.directory, _layers(plan, is_encrypted=is_encrypted))
        self.volumes[plan.volume.id] = VolumeObserved(
            volume_id=plan.volume.id,
            state="exported" if plan.is_exported else "idle",
            size_bytes=plan.volume.size_bytes,
            transport=plan.transport,
            path=path if plan.transport == "file" else plan.run_directory / "disk.sock",
            is_encrypted=is_encrypted,
        )
        return self.volumes[plan.volume.id]

    async def withdraw(self, volume_id: str) -> None:
        await self.faults.reach("storage.withdraw", volume_id)

    async def remove(self, volume_id: str) -> None:
        await self.faults.reach("storage.remove", volume_id)
        self.volumes.pop(volume_id, None)
        path = self._files.pop(volume_id, None)
        if path is not None:
            path.unlink(missing_ok=True)

    async def volume_ids(self) -> tuple[str, ...]:
        return tuple(self.volumes)

    async def snapshot(self, plan: VolumePlan, snapshot_id: str, directory: Path) -> None:
        await self.faults.reach("storage.snapshot", snapshot_id)
        directory.mkdir(parents=True, exist_ok=True)
        self._snapshots[snapshot_id] = directory
        shutil.copyfile(plan.directory / DISK, directory / DISK)
        found = layers.read(plan.directory)
        assert found is not None
        layers.write(
            directory,
            layers.Layers(
                layers=found.layers,
                size_bytes=found.size_bytes,
                volume_id=plan.volume.id,
                taken_unix_ms=time.time_ns() // 1_000_000,
            ),
        )

    async def drop_snapshot(self, snapshot_id: str, holders: Holders) -> None:
        del holders
        await self.faults.reach("storage.drop_snapshot", snapshot_id)
        directory = self._snapshots.pop(snapshot_id, None)
        if directory is not None:
            files.remove_tree(directory)


def _check(plan: VolumePlan, found: VolumeObserved | None) -> None:
    if plan.base is not None and not plan.base.exists():
        raise AgentError("volume.base_missing", f"the base image {plan.base.name} is not here", retryable=False)
    if found is None and plan.source is not None and not (plan.source / DISK).exists():
        raise AgentError("volume.source_missing", f"the snapshot {plan.source.name} is not here", retryable=False)
    if plan.missing_keys and (found is None or found.state == "idle") and plan.is_exported:
        raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=plan.missing_keys)
    if found is not None and plan.volume.size_bytes < found.size_bytes:
        raise AgentError("volume.shrink_refused", "a volume never shrinks", retryable=False)


def _layers(plan: VolumePlan, *, is_encrypted: bool) -> layers.Layers:
    layer = layers.Layer(file=DISK, key_id=plan.volume.id if is_encrypted else "")
    return layers.Layers(layers=(layer,), size_bytes=plan.volume.size_bytes)
