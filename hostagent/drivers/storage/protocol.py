"""Disks: created once, served by a user-space daemon, behind five words.

The one rule: data and export are different things. `apply` creates the data if absent and (re)starts the export;
a daemon's death loses no data, and only `remove` deletes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.supervisor.protocol import UnitWanted
from hostagent.lib.process import Incarnation
from hostagent.protocol.wanted import VolumeWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageTraits:
    """`can_grow_live`: a running guest sees the new size; else after its next start. `keeps_inflight`: a daemon that died and
    came back goes on with the requests that it had not answered (INFLIGHT_SHMFD); else they are lost, and the guest waits for
    them until it is reset.
    """

    name: Literal["qsd", "spdk", "fake"]
    transports: frozenset[DiskTransport]
    can_grow_live: bool = False
    can_snapshot: bool = False
    can_encrypt: bool = False
    keeps_inflight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumePlan:
    """`base` is the read-only image file below it (None: empty disk); `uid`/`gid` may connect to the export.

    `directory` survives reboots; `run_directory` (sockets) does not. `source`: the directory of the snapshot that new data
    begins as. `keys`: of all that the data is made of, by id, its own under the volume's id; without that new data is not
    encrypted. `missing_keys`: without them it cannot be opened. `is_exported`: whether anybody wants to use it.
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
    source: Path | None = None
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    missing_keys: tuple[str, ...] = ()
    is_exported: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeRendered:
    """`create` are the programs run once when the data is absent, in order; `unit` serves the export."""

    create: tuple[tuple[str, ...], ...]
    unit: UnitWanted | None


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeObserved:
    """`exported`: data there and served at `path`; `idle`: data there, not served. `is_growth_pending`: the connected machine
    sees the size only at its next start. `is_encrypted`: all of it but a base image.
    """

    volume_id: str
    state: Literal["exported", "idle"]
    size_bytes: int
    transport: DiskTransport
    path: Path
    is_encrypted: bool = False
    is_growth_pending: bool = False
    layers: int = 1
    incarnation: Incarnation | None = None


class StorageDriver(Protocol):
    traits: StorageTraits

    def render(self, plan: VolumePlan) -> VolumeRendered: ...

    async def observe(self, volume_id: str) -> VolumeObserved | None:
        """None = no data of it here."""
        ...

    async def apply(self, plan: VolumePlan) -> VolumeObserved:
        """Data created if absent (never overwritten), grown if larger is wanted, export up. Raises AgentError `disk.full`
        (retryable), `volume.locked` (retryable; context `needs`: keys), `volume.base_missing`, `volume.source_missing`,
        `volume.shrink_refused` (not retryable).
        """
        ...

    async def withdraw(self, volume_id: str) -> None:
        """Not served any more. Absent is success. Raises AgentError `volume.in_use` while a machine holds it."""
        ...

    async def remove(self, volume_id: str) -> None:
        """As `withdraw`, and the data deleted. Whoever has keys to erase does so in between."""
        ...

    async def volume_ids(self) -> tuple[str, ...]: ...


class Holders(Protocol):
    """What else stands on a snapshot's data, for the driver to ask about."""

    async def plan(self, volume_id: str) -> VolumePlan | None:
        """None: no document wants this volume (any more)."""
        ...

    async def keys(self, directory: Path) -> dict[str, bytes]:
        """The keys of the volume or snapshot in this directory, as far as they can be opened."""
        ...


@runtime_checkable
class VolumeSnapshots(Protocol):
    """Point-in-time copies (traits.can_snapshot)."""

    async def snapshot(self, plan: VolumePlan, snapshot_id: str, directory: Path) -> None:
        """What the volume holds now, in `directory` (its `layers.json` written last). Doing it again is doing it once."""
        ...

    async def drop_snapshot(self, snapshot_id: str, holders: Holders) -> None:
        """Its directory goes, and what its data took beside others' is free when this returns. May take as long as copying
        the volume; may be cancelled or die at any point and is then called again. Absent is success. Raises AgentError
        `snapshot.in_use` (another volume began as it; nothing was done), `volume.locked`, `volume.merge_failed`, `disk.full`.
        """
        ...
