"""The acceptance of the whole: `bedplate demo --once` from nothing to a model's answer, and `--clean` back to nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.embedded.cleaning import processes_of

ROOT = Path(__file__).resolve().parents[2]


def demo(directory: Path, *arguments: str, seconds: int) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "controlplane.cli.main", "demo", "--state", str(directory), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BEDPLATE_")}
    for name in ("BEDPLATE_CACHE_DIR", "BEDPLATE_CACHE", "BEDPLATE_APT_MIRROR"):
        if name in os.environ:
            environment[name] = os.environ[name]
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        argv, check=False, capture_output=True, text=True, timeout=seconds, cwd="/", env=environment, stdin=subprocess.DEVNULL
    )


def footprint() -> dict[str, set[str]]:
    """What a demo must not leave on this machine."""
    links = json.loads(subprocess.run(["ip", "-j", "link"], check=True, capture_output=True).stdout)
    return {
        "links": {link["ifname"] for link in links if link["ifname"].startswith("bl")},
        "mounts": {line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()},
    }


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="bpd-"))
    path.chmod(0o711)
    try:
        yield path / "demo"
    finally:
        demo(path / "demo", "--clean", seconds=120)
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "runc", "debootstrap")
@pytest.mark.timeout(2400)
def test_once_answers_and_clean_leaves_nothing(directory: Path) -> None:
    before = footprint()
    done = demo(directory, "--once", "--json", seconds=2000)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["ok"]
    assert told["answer"].strip()
    assert [step["name"] for step in told["steps"] if step["state"] != "done"] == []
    assert all(step["seconds"] >= 0 for step in told["steps"])
    assert processes_of(directory) == []

    cleaned = demo(directory, "--clean", seconds=120)
    assert cleaned.returncode == 0, cleaned.stdout + cleaned.stderr
    assert "after:  0 processes, 0 mounts, 0 links, 0 files" in cleaned.stdout
    assert not directory.exists()
    left = {kind: now - before[kind] for kind, now in footprint().items()}
    assert not left["mounts"] & {str(directory)}, left
    assert not [mount for mount in left["mounts"] if mount.startswith(str(directory))]
