"""Builds the host agent's one file. The one rule: the same sources make the same bytes, so the digest is the version.

It carries the agent, pyroute2 and h2 (pure Python) as installed here, without what the agent never uses; fixed times, sorted
names, no compiled files.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SHEBANG = b"#!/usr/bin/python3\n"
MAIN = "import sys\n\nfrom hostagent.__main__ import main\n\nsys.exit(main(sys.argv[1:]))\n"
LIMIT_BYTES = 1_000_000
VERSION_LENGTH = 16
_TIME = (1980, 1, 1, 0, 0, 0)
_UNUSED = ("pyroute2/bsd/", "pyroute2/decoder/", "pyroute2/dhcp/", "pyroute2/fixtures/", "pyroute2/inotify/")
_LICENCES = ("LICENSE", "COPYING")
_VENDORED = ("pyroute2", "h2", "hpack", "hyperframe")


class TooLarge(Exception):
    """The file would be over LIMIT_BYTES."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFile:
    """`version`: what the agent itself says, the first digits of `sha256`."""

    content: bytes
    sha256: str

    @property
    def version(self) -> str:
        return self.sha256[:VERSION_LENGTH]

    def write(self, directory: Path) -> Path:
        """`<directory>/<sha256>/agent.pyz`, written once."""
        path = directory / self.sha256 / "agent.pyz"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".partial")
            temporary.write_bytes(self.content)
            temporary.chmod(0o755)
            temporary.rename(path)
        return path


@cache
def build() -> AgentFile:
    """Raises TooLarge, and ModuleNotFoundError when a package to be carried is not installed here."""
    members = {**_package("hostagent"), "__main__.py": MAIN.encode()}
    for name in _VENDORED:
        members |= {**_package(name), **_licences(name)}
    buffer = io.BytesIO(SHEBANG)
    buffer.seek(0, io.SEEK_END)
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, _TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, members[name])
    content = buffer.getvalue()
    if len(content) > LIMIT_BYTES:
        raise TooLarge(f"the agent's file has {len(content)} bytes, the limit is {LIMIT_BYTES}")
    return AgentFile(content=content, sha256=hashlib.sha256(content).hexdigest())


def _package(name: str) -> dict[str, bytes]:
    """Every module of an importable package by its path in the archive; the package is found, not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed")
    root = Path(spec.submodule_search_locations[0])
    found = {f"{name}/{path.relative_to(root).as_posix()}": path for path in root.rglob("*.py")}
    return {inside: path.read_bytes() for inside, path in found.items() if not inside.startswith(_UNUSED)}


def _licences(distribution: str) -> dict[str, bytes]:
    """The licence texts that must travel with a vendored package."""
    files = importlib.metadata.files(distribution) or []
    kept = [file for file in files if ".dist-info" in str(file) and file.name.startswith(_LICENCES)]
    return {f"licences/{distribution}/{file.name}": file.read_binary() for file in kept}
