"""Suites whose parts need systemd, run by pytest on the server itself: what is left out elsewhere is seen here."""

from __future__ import annotations

import io
import re
import tarfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from provisioning.lab.metal import MetalHost

pytestmark = [
    pytest.mark.metal,
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.caps("root", "qemu", "debootstrap"),
]
ROOT = Path(__file__).parents[2]
PLUGINS = ("pytest", "pytest-asyncio", "pytest-timeout")
PLACE = "/tmp/suite"
SUITES = {"tests/conformance/test_supervisors.py": "systemd"}


def distributions(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Those of this environment with all that they need; the server's Python is of the same kind, and these are pure Python."""
    found: dict[str, metadata.Distribution] = {}
    pending = list(names)
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


def bundle() -> bytes:
    """The suites, what they test, and pytest, as a tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for distribution in distributions(PLUGINS).values():
            for file in distribution.files or ():
                if file.suffix in (".py", ".txt") or ".dist-info" in file.parts[0]:
                    archive.add(str(file.locate()), f"site/{file}")
        for path in (*(ROOT / "hostagent").rglob("*.py"), *(ROOT / "tests/conformance").glob("*.py")):
            archive.add(path, str(path.relative_to(ROOT)))
        for name in ("pyproject.toml", "tests/__init__.py"):
            archive.add(ROOT / name, name)
    return buffer.getvalue()


def test_what_needs_systemd_passes_on_the_server(metal: MetalHost) -> None:
    metal.exec(["mkdir", PLACE])
    try:
        metal.exec(["tar", "-x", "-C", PLACE, "-f", "-"], stdin=bundle())
        for path, words in SUITES.items():
            argv = ["env", "-C", PLACE, f"PYTHONPATH={PLACE}/site:{PLACE}", "python3", "-m", "pytest", "-p", "no:cacheprovider"]
            argv += ["--confcutdir=tests/conformance", path, "-k", words]
            done = metal.exec(argv, timeout=400, check=False)
            said = done.stdout.decode()
            assert done.returncode == 0, said
            assert re.search(r"\b[1-9]\d* passed", said), said
            assert "skipped" not in said, said
    finally:
        metal.exec(["rm", "-rf", PLACE])
