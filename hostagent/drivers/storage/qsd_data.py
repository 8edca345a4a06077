"""A volume's files: made, shared, opened to its machine's user. No daemon is spoken to here.

The one rule: names in a volume's directory are read back as root, so its machine's user may write its disk and no more.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from hostagent.drivers.storage import layers, luks
from hostagent.drivers.storage.layers import Layer, Layers
from hostagent.drivers.storage.protocol import VolumePlan
from hostagent.drivers.storage.qsd_graph import export_path
from hostagent.lib import files
from hostagent.protocol.errors import AgentError


def found_in(directory: Path) -> Layers | None:
    """Its layers; of a volume from before there were any, its one plain file."""
    found = layers.read(directory)
    if found is None and (directory / layers.FIRST).exists() and not (directory / "keys").exists():
        return Layers(layers=(Layer(file=layers.FIRST),))
    return found


async def create(plan: VolumePlan) -> Layers:
    plan.directory.mkdir(parents=True, exist_ok=True)
    found = Layers(layers=())
    if plan.source is not None:
        source = layers.read(plan.source)
        if source is None:
            raise AgentError("volume.source_missing", f"the snapshot {plan.source.name} is not here", retryable=False)
        if plan.volume.size_bytes < source.size_bytes:
            raise AgentError("volume.shrink_refused", "a clone is not smaller than its snapshot", retryable=False)
        layers.share(plan.source, plan.directory, source.names)
        found = dataclasses.replace(source, volume_id="", taken_unix_ms=0)
    elif plan.base is not None:
        _link_base(plan)
        found = dataclasses.replace(found, base_format=plan.base_format)
    return await add_layer(plan, found, "")


async def add_layer(plan: VolumePlan, found: Layers, snapshot_id: str) -> Layers:
    """An empty layer on top; the one below it is closed for the snapshot."""
    is_first = not any(layer.key_id == plan.volume.id for layer in found.layers)
    key_id = plan.volume.id if plan.volume.id in plan.keys else ""
    if not snapshot_id and is_first and plan.volume.id in plan.missing_keys:
        raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=[plan.volume.id])
    if snapshot_id and found.top.key_id and not key_id:
        raise AgentError("volume.locked", f"{plan.volume.id} waits for its keys", needs=[found.top.key_id])
    layer = Layer(file=found.next_file, key_id=key_id)
    size_bytes = qcow2_size(plan.directory / found.top.file) if snapshot_id else plan.volume.size_bytes
    passphrase = luks.passphrase_of(plan.keys[key_id]) if key_id else None
    files.write_atomically(plan.directory / layer.file, await luks.empty_disk(size_bytes, passphrase))
    files.give(plan.directory / layer.file, plan.uid, plan.gid, 0o600)
    below = found.layers
    if snapshot_id:
        below = (*below[:-1], dataclasses.replace(found.top, snapshot_id=snapshot_id))
    fresh = dataclasses.replace(found, layers=(*below, layer))
    layers.write(plan.directory, fresh)
    return fresh


def prepare(plan: VolumePlan, found: Layers) -> None:
    """Everything as a new daemon must find it."""
    plan.run_directory.mkdir(parents=True, exist_ok=True)
    for stale in plan.run_directory.iterdir():
        stale.unlink()
    files.give(plan.run_directory, plan.uid, plan.gid, 0o700)
    files.give(plan.directory, os.geteuid(), plan.gid, 0o750)
    files.give(plan.directory / found.top.file, plan.uid, plan.gid, 0o600)
    if plan.transport == "file":
        export_path(plan.run_directory, plan.transport).touch(mode=0o600)


def _link_base(plan: VolumePlan) -> None:
    """The volume's own name for its base, so that removing the image never pulls it from under a disk."""
    assert plan.base is not None
    link = plan.directory / layers.BASE
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(plan.base.resolve())
    except FileNotFoundError as error:
        raise AgentError("volume.base_missing", f"{plan.base} is not on this host", retryable=False) from error
    except OSError:
        link.symlink_to(plan.base.resolve())


def qcow2_size(disk: Path) -> int:
    """The virtual size in bytes: big-endian, 8 bytes at offset 24 (QEMU, docs/interop/qcow2.txt)."""
    with disk.open("rb") as file:
        header = file.read(32)
    if header[:4] != b"QFI\xfb":
        raise AgentError("volume.damaged", f"{disk} is not a qcow2 file", retryable=False)
    return int.from_bytes(header[24:32], "big")
