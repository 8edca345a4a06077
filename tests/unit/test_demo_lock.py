"""Two demos in one directory: the second must not end the first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.embedded import demo


def test_a_second_demo_leaves_a_running_one_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the demo needs root before it looks at anything")
    kept = tmp_path / "kept"
    kept.touch()
    with demo.hold(tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "controlplane.embedded.demo", "--once", "--state", str(tmp_path)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert f"(pid {os.getpid()})" in done.stderr
    assert kept.exists()


def test_a_lock_whose_holder_ended_is_free(tmp_path: Path) -> None:
    demo.hold(tmp_path).close()
    demo.hold(tmp_path).close()
