"""An image's manifest: what an importer must know, with the digest of every file.

The one rule: the manifest is the image's identity for the control plane; what does not stand in it is not part of it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    name: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """Direct kernel boot; the machine driver adds what depends on the host (`tsc_early_khz`)."""

    kernel_file: str
    initramfs_file: str
    cmdline: str
    kind: Literal["kernel"] = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """`min_disk_bytes` is the size of the root file system; a disk must be at least that large. `runs_workloads`: the guest
    keeps the seed's workload running.
    """

    name: str
    description: str
    architecture: str
    os: str
    default_user: str
    root_file: str
    min_disk_bytes: int
    min_memory_bytes: int
    boot: Boot
    files: tuple[ManifestFile, ...]
    runs_workloads: bool = False
    format: Literal[1] = 1


def write_manifest(directory: Path, manifest: Manifest) -> None:
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n")


def read_manifest(directory: Path) -> Manifest:
    data = json.loads((directory / MANIFEST).read_text())
    files = tuple(ManifestFile(**entry) for entry in data.pop("files"))
    return Manifest(boot=Boot(**data.pop("boot")), files=files, **data)
