"""Disks: created once, served by a user-space daemon, behind five words.

The one rule: data and export are different things. `apply` creates the data if absent and (re)starts the export;
a daemon's death loses no data, and only `remove` deletes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.supervisor.protocol import UnitWanted
from hostagent.protocol.wanted import VolumeWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTraits:
    """`can_grow_live`: a running guest sees the new size; else after its next start."""

    name: Literal["qsd", "spdk", "fake"]
    transports: frozenset[DiskTransport]
    can_grow_live: bool = False
    can_snapshot: bool = False
    can_encrypt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumePlan:
    """`base` is the read-only image file below it (None: empty disk); `uid`/`gid` may connect to the export.

    `directory` survives reboots; `run_directory` (sockets) does not.
    """

    volume: VolumeWanted
    directory: Path
    run_directory: Path
    log_path: Path
    transport: DiskTransport = "vhost_user_blk"
    base: Path | None = None
    base_format: Literal["raw", "qcow2"] = "raw"
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRendered:
    """`create` are the programs run once when the data is absent, in order; `unit` serves the export."""

    create: tuple[tuple[str, ...], ...]
    unit: UnitWanted | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeObserved:
    """`exported`: data there and served at `path`; `idle`: data there, not served."""

    volume_id: str
    state: Literal["exported", "idle"]
    size_bytes: int
    transport: DiskTransport
    path: Path


class StorageDriver(Protocol):
    traits: StorageTraits

    def render(self, plan: VolumePlan) -> VolumeRendered: ...

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        """None = no data of it here."""
        ...

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        """Data created if absent (never overwritten), grown if larger is wanted, export up. Raises AgentError `disk.full`
        (retryable), `volume.base_missing`, `volume.shrink_refused` (not retryable).
        """
        ...

    async def remove(self, volume_id: str) -> None:
        """Export down and data deleted. Absent is success. Raises AgentError `volume.in_use` while a machine holds it."""
        ...

    async def volume_ids(self) -> tuple[str, ...]: ...


@runtime_checkable
class VolumeSnapshots(Protocol):
    """Point-in-time copies (traits.can_snapshot)."""

    async def snapshot(self, volume_id: str, snapshot_id: str) -> None: ...

    async def remove_snapshot(self, volume_id: str, snapshot_id: str) -> None: ...
