"""Tests and benchmarks that run on the server itself: with all that they need, as one archive over SSH."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from provisioning.lab.metal import MetalHost

ROOT = Path(__file__).parents[2]
PACKAGES = ("pytest", "pytest-asyncio", "pytest-timeout", "pyroute2")
PLACE = "/tmp/suite"
CLEAN = f"rm -rf {PLACE}; systemctl stop bedplate.slice; umount /run/netns; rmdir /run/netns"
SHIPPED = ("hostagent", "tests/conformance", "tests/agent", "tests/bench")
FILES = ("pyproject.toml", "tests/__init__.py", "tests/capabilities.py", "tests/namespaces.py")


@contextlib.contextmanager
def shipped(server: MetalHost) -> Iterator[list[str]]:
    """The beginning of an argv for Python there, with this repository's modules; nothing is left afterwards."""
    server.exec(["mkdir", PLACE])
    try:
        server.exec(["tar", "-x", "-C", PLACE, "-f", "-"], stdin=bundle())
        server.exec(["mkdir", f"{PLACE}/tmp"])
        yield ["env", "-C", PLACE, f"TMPDIR={PLACE}/tmp", f"PYTHONPATH={PLACE}/site:{PLACE}", "python3"]
    finally:
        server.exec(["sh", "-c", CLEAN], check=False)


def bundle() -> bytes:
    """The server's Python is of the same kind as this one, and all of it is pure Python."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for distribution in _distributions().values():
            for file in distribution.files or ():
                if file.suffix in (".py", ".txt") or ".dist-info" in file.parts[0]:
                    archive.add(str(file.locate()), f"site/{file}")
        for directory in SHIPPED:
            for path in (ROOT / directory).rglob("*.py"):
                archive.add(path, str(path.relative_to(ROOT)))
        for name in FILES:
            archive.add(ROOT / name, name)
    return buffer.getvalue()


def _distributions() -> dict[str, metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}
    pending = list(PACKAGES)
    while pending:
        name = pending.pop()
        if name.lower() in found:
            continue
        found[name.lower()] = metadata.distribution(name)
        for line in found[name.lower()].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found
