"""Volumes of a real qemu-storage-daemon, and their bytes as a machine sees them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from pathlib import Path

from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.wanted import Generation, VolumeWanted

MIB = 1 << 20
VOLUME, CLONE, SNAPSHOT = "vol_1", "vol_2", "snap_1"
UID = 0x7800_0000
KEY, OTHER_KEY = os.urandom(32), os.urandom(32)


def plan_of(paths: Paths, volume_id: str, *, base: Path | None = None, source: Path | None = None) -> VolumePlan:
    return VolumePlan(
        volume=VolumeWanted(id=volume_id, generation=Generation(epoch=1, number=1), size_bytes=8 * MIB),
        directory=paths.volume_directory(volume_id),
        run_directory=paths.volume_run_directory(volume_id),
        log_path=paths.log / f"{volume_id}.log",
        base=base,
        uid=UID,
        gid=UID,
        source=source,
        transport="file",
        keys={VOLUME: KEY} | ({} if volume_id == VOLUME else {volume_id: OTHER_KEY}),
    )


def with_volume(plan: VolumePlan, **changed: object) -> VolumePlan:
    return dataclasses.replace(plan, volume=dataclasses.replace(plan.volume, **changed))


class Disk:
    """A volume as its machine sees it: here by the daemon's FUSE export, which is a plain file."""

    def __init__(self, plan: VolumePlan) -> None:
        self.path = plan.run_directory / "disk.raw"

    async def write(self, pattern: int, at: int, size: int = 64 << 10) -> None:
        """On stable storage afterwards."""
        await asyncio.to_thread(self.put, bytes([pattern]) * size, at)

    async def holds(self, pattern: int, at: int, size: int = 4 << 10) -> bool:
        return await asyncio.to_thread(self.get, at, size) == bytes([pattern]) * size

    def put(self, data: bytes, at: int) -> None:
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            for offset in range(0, len(data), MIB):
                os.pwrite(descriptor, data[offset : offset + MIB], at + offset)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def get(self, at: int, size: int) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(descriptor, size, at)
        finally:
            os.close(descriptor)


async def kill_daemon(qsd: QsdStorage, volume_id: str = VOLUME) -> None:
    unit = await qsd.supervisor.observe(f"volume-{volume_id}")
    assert unit is not None
    assert unit.incarnation is not None
    os.kill(unit.incarnation.pid, signal.SIGKILL)

    async def has_ended() -> bool:
        observed = await qsd.supervisor.observe(f"volume-{volume_id}")
        return observed is None or observed.state == "exited"

    assert await until(has_ended, seconds=10)
