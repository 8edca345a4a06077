"""What a storage daemon is told over QMP: the nodes of a volume from its base to its export. Pure.

The one rule: keys are named here and never held. Formats are named, never detected: a guest writes its disk's first bytes,
and no file names another one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hostagent.drivers.machine.protocol import DiskTransport
from hostagent.drivers.storage.layers import BASE, Layer, Layers
from hostagent.protocol.wanted import QosWanted, VolumeWanted

LIMITS = "limits"
ROOT = "disk"
EXPORT = "export"
Word = tuple[str, dict[str, Any]]


def export_path(run_directory: Path, transport: DiskTransport) -> Path:
    return run_directory / ("disk.sock" if transport == "vhost_user_blk" else "disk.raw")


def node_of(layer: Layer, version: int = 0) -> str:
    """`version`: of a node that takes the place of another one on the same file."""
    return f"layer{layer.number}" + (f"v{version}" if version else "")


def number_of(node: str) -> int:
    """Of the layer; -1 for any other node."""
    found = re.match(r"layer(\d+)(v\d+)?$", node)
    return int(found[1]) if found else -1


def secret_of(key_id: str) -> str:
    return f"key-{key_id}"


def graph(volume: VolumeWanted, directory: Path, found: Layers) -> tuple[Word, ...]:
    """Everything but secrets and export; the last layer alone is written."""
    words: list[Word] = [("object-add", {"qom-type": "throttle-group", "id": LIMITS, "limits": limits(volume.qos)})]
    below: str | None = None
    if found.base_format:
        words.append(("blockdev-add", _file("base_file", directory / BASE, is_read_only=True)))
        words.append(("blockdev-add", {"driver": found.base_format, "node-name": BASE, "file": "base_file", "read-only": True}))
        below = BASE
    last = len(found.layers) - 1
    for index, layer in enumerate(found.layers):
        words += layer_words(directory, layer, node_of(layer), below=below, is_read_only=index < last)
        below = node_of(layer)
    throttle = {"driver": "throttle", "node-name": ROOT, "throttle-group": LIMITS, "file": below}
    return (*words, ("blockdev-add", throttle))


def layer_words(directory: Path, layer: Layer, name: str, *, below: str | None, is_read_only: bool = False) -> list[Word]:
    file = _file(f"{name}_file", directory / layer.file, is_read_only=is_read_only)
    return [("blockdev-add", file), ("blockdev-add", layer_node(layer, name, below=below, is_read_only=is_read_only))]


def layer_node(layer: Layer, name: str, *, below: str | None, is_read_only: bool = False) -> dict[str, Any]:
    """The format's node; told again as a whole, it puts the layer upon another one."""
    node: dict[str, Any] = {"driver": "qcow2", "node-name": name, "file": f"{name}_file", "backing": below}
    node |= {"read-only": True} if is_read_only else {"discard": "unmap"}
    if layer.key_id:
        node["encrypt"] = {"format": "luks", "key-secret": secret_of(layer.key_id)}
    return node


def export(volume: VolumeWanted, run_directory: Path, transport: DiskTransport) -> Word:
    path = str(export_path(run_directory, transport))
    common: dict[str, Any] = {"id": EXPORT, "node-name": ROOT, "writable": True}
    if transport == "file":
        return ("block-export-add", common | {"type": "fuse", "mountpoint": path, "growable": False})
    address = {"type": "unix", "path": path}
    served = {"type": "vhost-user-blk", "addr": address, "num-queues": volume.num_queues, "iothread": "io"}
    return ("block-export-add", common | served)


def limits(qos: QosWanted) -> dict[str, int]:
    """QEMU's words: `-max` is the rate of a burst, `-max-length` its seconds."""
    found: dict[str, int] = {}
    for name, rate, burst in (
        ("iops-total", qos.iops, qos.burst_iops),
        ("bps-total", qos.bytes_per_second, qos.burst_bytes_per_second),
    ):
        has_burst = rate and burst > rate
        found |= {name: rate, f"{name}-max": burst if has_burst else 0}
        found[f"{name}-max-length"] = max(qos.burst_seconds, 1) if has_burst else 1
    return found


def _file(name: str, path: Path, *, is_read_only: bool) -> dict[str, Any]:
    node: dict[str, Any] = {"driver": "file", "node-name": name, "filename": str(path), "read-only": is_read_only}
    return node if is_read_only else node | {"discard": "unmap"}
