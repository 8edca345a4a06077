"""Two demos in one directory: the second must not end the first."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.embedded import cleaning, demo
from provisioning.lab.network import GATEWAY_NAME
from tests import namespaces


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


HOLDER = """
import signal, sys, time
from pathlib import Path
from controlplane.embedded import demo

directory = Path(sys.argv[1])
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
with demo.hold(directory):
    print("held", flush=True)
    while not stopping:
        time.sleep(0.01)
    time.sleep(0.3)
    (directory / "last").write_text("words")
"""


def test_clean_waits_for_a_demo_that_is_stopping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it writes to the end finds its directory there, and nothing is left."""
    directory = tmp_path / "demo"
    directory.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(directory)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert cleaning.clean(directory) == 0
        assert holder.wait(10) == 0
    assert not directory.exists()
    assert "0 files" in capsys.readouterr().out


@pytest.mark.caps("root", "netns")
def test_a_second_demo_in_a_network_namespace_is_refused_at_once(tmp_path: Path) -> None:
    with namespaces.own(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as gateway:
        gateway.bind(f"\0{GATEWAY_NAME}")
        argv = [sys.executable, "-m", "controlplane.embedded.demo", "--once", "--state", str(tmp_path / "demo")]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another demo or lab has its gateway in this network namespace" in done.stderr
    assert not (tmp_path / "demo").exists()


@pytest.mark.caps("root", "netns")
def test_of_two_demos_started_together_one_runs(tmp_path: Path) -> None:
    """The second is refused from the first one's first moment, long before there is a gateway."""
    with namespaces.own(), demo.hold_network():
        argv = [sys.executable, "-m", "controlplane.embedded.demo", "--once", "--state", str(tmp_path / "demo")]
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "another demo runs in this network namespace" in done.stderr
    assert not (tmp_path / "demo").exists()
