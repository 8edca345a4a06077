"""`./bedplate` sets a checkout up once, also when two start at the same time, and then starts quickly."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "bedplate",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "controlplane",
    "hostagent",
    "provisioning",
    "migrations",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources in a directory that only we may enter, with blanks in its name."""
    target = tmp_path / "my checkout"
    target.mkdir(mode=0o700)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, target / part)
    return target


def start(checkout: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    return subprocess.Popen(
        [str(checkout / "bedplate"), "version"],
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_first_starts_set_up_once_and_later_ones_start_at_once(checkout: Path) -> None:
    both = [start(checkout), start(checkout)]
    told = [process.communicate(timeout=500) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert [output for output, _ in told] == ["0.1.0\n", "0.1.0\n"]
    assert sum("preparing the Python environment" in words for _, words in told) == 1

    seconds: list[float] = []
    for _ in range(3):
        began = time.monotonic()
        output, words = start(checkout).communicate(timeout=60)
        seconds.append(time.monotonic() - began)
        assert (output, words) == ("0.1.0\n", "")
    assert min(seconds) < 2

    pins = checkout / "constraints.txt"
    pins.write_text(pins.read_text() + "# changed\n")
    _, words = start(checkout).communicate(timeout=500)
    assert "preparing the Python environment" in words
