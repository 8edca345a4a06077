"""What a volume's data is made of: files, one above the other, the last one written and all others never again.

The one rule: `layers.json` is on disk before a daemon writes by it, and names nothing that is gone. A layer is shared by hard
links: each volume and snapshot has names of its own for all it stands on, so none is ever pulled from under another, and the
last one's end frees the space.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hostagent.lib import files
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError

FILE = "layers.json"
FIRST = "disk.qcow2"
BASE = "base"
_BLOCK = 512  # of st_blocks, whatever the file system's is


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """`key_id`: the key it is encrypted with, "" for none. `snapshot_id`: the snapshot for which it was closed."""

    file: str
    key_id: str = ""
    snapshot_id: str = ""

    @property
    def number(self) -> int:
        """Of its name, and never another layer's in the same directory."""
        return 0 if self.file == FIRST else int(self.file.split(".")[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Lowest first. `base_format`: of the read-only image below them all, "" where there is none. Of a snapshot besides: the
    volume, and when it was taken.
    """

    layers: tuple[Layer, ...]
    base_format: Literal["", "raw", "qcow2"] = ""
    size_bytes: int = 0
    volume_id: str = ""
    taken_unix_ms: int = 0

    @property
    def top(self) -> Layer:
        return self.layers[-1]

    @property
    def next_file(self) -> str:
        """A name that no layer has: those that were merged away leave gaps."""
        return f"disk.{self.top.number + 1}.qcow2" if self.layers else FIRST

    def closed_for(self, snapshot_id: str) -> int | None:
        """Where in the order the layer is that was closed for this snapshot, with another one above it."""
        for index, layer in enumerate(self.layers[:-1]):
            if layer.snapshot_id == snapshot_id:
                return index
        return None

    @property
    def is_encrypted(self) -> bool:
        return all(layer.key_id for layer in self.layers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all files, the base among them."""
        return ((BASE,) if self.base_format else ()) + tuple(layer.file for layer in self.layers)


def read(directory: Path) -> Layers | None:
    """None = no data here. Raises AgentError `volume.damaged`."""
    try:
        content = (directory / FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return codec.decode(Layers, json.loads(content))
    except ValueError as error:
        raise AgentError("volume.damaged", f"{directory / FILE} cannot be read: {error}", retryable=False) from error


def write(directory: Path, layers: Layers) -> None:
    files.write_atomically(directory / FILE, json.dumps(codec.encode(layers)).encode())


def told(directory: Path, subject_id: str) -> list[dict[str, str | int]]:
    """What a volume or snapshot stands on, for the control plane: `id` is the snapshot for which a layer was closed, else the
    volume that writes to it; `bytes` what it takes on disk now.
    """
    found = read(directory)
    return [
        {"id": layer.snapshot_id or subject_id, "bytes": (directory / layer.file).stat().st_blocks * _BLOCK}
        for layer in (found.layers if found else ())
    ]


def unnamed(directory: Path) -> tuple[Path, ...]:
    """Layers' files that are none of its layers; while nobody changes it, they are what was merged away."""
    found = read(directory)
    names = set(found.names) if found else set()
    return tuple(path for path in sorted(directory.glob("disk*.qcow2")) if path.name not in names) if found else ()


def share(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Names of one's own for another's files. They stay what they are; the caller writes `layers.json` afterwards."""
    with files.disk_errors(target):
        target.mkdir(parents=True, exist_ok=True, mode=0o755)
        for name in names:
            link = target / name
            link.unlink(missing_ok=True)
            if (source / name).is_symlink():
                link.symlink_to((source / name).readlink())
            else:
                link.hardlink_to(source / name)
        files.sync_directory(target)
