"""The list of artifacts: what hosts run, with source, licence and the driver that needs each.

The one rule: nothing here is guessed. A digest is known and checked, or empty and confirmed by a person.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("artifacts.toml")
SOURCES = ("package", "url", "artifact-dir")
ARCHITECTURES = ("x86_64", "aarch64", "any")
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine, ELF-64 object file format
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactsInvalid(ValueError):
    """The list does not fit its rules; the text names the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One thing that a driver needs. `file`: its name in an artifact directory and on the host.

    `stands_in_for`: needed only where the kernel lacks this kind of link.
    """

    name: str
    version: str
    architecture: str
    source: str
    licence: str
    driver: str
    package: str = ""
    file: str = ""
    url: str = ""
    sha256: str = ""
    stands_in_for: str = ""


@cache
def load(path: Path = LIST) -> tuple[Artifact, ...]:
    """Raises ArtifactsInvalid."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if data.get("format") != 1:
        raise ArtifactsInvalid(f"{path}: format {data.get('format')} is unknown")
    found = tuple(_artifact(entry) for entry in data.get("artifact", []))
    names = [(artifact.name, artifact.architecture) for artifact in found]
    if len(set(names)) != len(names):
        raise ArtifactsInvalid(f"{path}: an artifact is listed twice for one architecture")
    return found


def _artifact(entry: dict[str, Any]) -> Artifact:
    name = entry.get("name", "?")
    known = {field.name for field in fields(Artifact)}
    if unknown := set(entry) - known:
        raise ArtifactsInvalid(f"{name}: unknown keys {', '.join(sorted(unknown))}")
    try:
        artifact = Artifact(**entry)
    except TypeError as error:
        raise ArtifactsInvalid(f"{name}: {error}") from error
    if artifact.source not in SOURCES or artifact.architecture not in ARCHITECTURES:
        raise ArtifactsInvalid(f"{name}: unknown source or architecture")
    if artifact.sha256 and not _SHA256.fullmatch(artifact.sha256):
        raise ArtifactsInvalid(f"{name}: sha256 is not one")
    needs = {
        "package": artifact.package,
        "url": artifact.url and artifact.file and artifact.sha256,
        "artifact-dir": artifact.file,
    }
    if not needs[artifact.source]:
        raise ArtifactsInvalid(f"{name}: source {artifact.source} lacks a key")
    return artifact


def packages(architecture: str, artifacts: tuple[Artifact, ...] | None = None) -> tuple[str, ...]:
    """The distribution's packages that a host of this architecture needs, sorted, each once."""
    found = artifacts if artifacts is not None else load()
    return tuple(sorted({item.package for item in _packaged(architecture, found) if not item.stands_in_for}))


def fallbacks(architecture: str) -> dict[str, str]:
    """Packages that only some hosts need, with the kind of link that their kernels lack."""
    return {item.package: item.stands_in_for for item in _packaged(architecture, load()) if item.stands_in_for}


def _packaged(architecture: str, found: tuple[Artifact, ...]) -> list[Artifact]:
    return [item for item in found if item.source == "package" and item.architecture in (architecture, "any")]


def architecture_of(program: Path) -> str | None:
    """What an ELF program was built for; None for what is no 64-bit ELF file."""
    with program.open("rb") as stream:
        head = stream.read(20)
    if head[:5] != b"\x7fELF\x02" or len(head) < 20:
        return None
    return ELF_MACHINES.get(int.from_bytes(head[18:20], "little"))
