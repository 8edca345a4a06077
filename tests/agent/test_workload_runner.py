"""The guest image's workload runner, run here on disks of files: what the command sees, and that it is kept running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostagent.drivers.machine.imagedisk import MKE2FS
from hostagent.drivers.machine.seed import workload_text
from hostagent.protocol.wanted import MountWanted, WorkloadWanted
from provisioning.images.recipe import FILES

pytestmark = pytest.mark.caps("root", "netns", "busybox")
RUNNER = FILES / "workload-runner"
SECONDS = 30
# The disks are files here; everything else is the program as it is in a guest.
DRIVER = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.SourceFileLoader("runner", sys.argv[2])
runner = importlib.util.module_from_spec(importlib.util.spec_from_loader("runner", loader))
loader.exec_module(runner)
directory = sys.argv[3]
runner.SCRATCH = directory + "/scratch"
runner.FIRST_PAUSE_SECONDS = 0.05
runner.disk_of = lambda serial: f"{directory}/{serial}.ext4"
runner.main()
"""
SCRIPT = """
echo "args $1|$2"
echo "env $PLAIN $SECRET"
id
echo "pid $$"
cat /models/weights /etc/hostname
grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status
echo written > /models/x
touch /data/mine && echo "scratch is writable"
echo t > /tmp/t && echo "tmp is writable"
ls /data/old 2> /dev/null || touch /data/old
mount -t tmpfs tmpfs /tmp
sleep 0.2
exit 3
"""


def disk(target: Path, tree: Path) -> None:
    subprocess.run([MKE2FS, "-q", "-t", "ext4", "-O", "^has_journal", "-d", str(tree), str(target), "16m"], check=True)


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="bp-runner-"))
    tree, weights = directory / "tree", directory / "weights"
    for name in ("usr/bin", "data", "etc", "proc", "sys", "tmp", "dev"):
        (tree / name).mkdir(parents=True)
    (tree / "data").chmod(0o777)
    (tree / "bin").symlink_to("usr/bin")
    (tree / "models").symlink_to("/../../var/models")  # stays inside
    shutil.copy(shutil.which("busybox") or "", tree / "usr/bin/busybox")
    for name in ("sh", "id", "cat", "grep", "touch", "mount", "ls", "sleep"):
        (tree / "usr/bin" / name).symlink_to("busybox")
    (tree / "data/run").write_text(SCRIPT)
    weights.mkdir()
    (weights / "weights").write_text("the weights\n")
    disk(directory / "workload-root.ext4", tree)
    disk(directory / "mount0.ext4", weights)
    yield directory
    shutil.rmtree(directory)


def run(directory: Path, workload: WorkloadWanted) -> tuple[subprocess.Popen[bytes], Path]:
    described, log = directory / "workload.json", directory / "log"
    described.write_text(workload_text(workload))
    argv = [sys.executable, "-c", DRIVER, str(described), str(RUNNER), str(directory)]
    with log.open("wb") as output:
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT), log


def until(log: Path, text: str, count: int = 1) -> str:
    end = time.monotonic() + SECONDS
    while (said := log.read_text(errors="replace")).count(text) < count:
        assert time.monotonic() < end, said
        time.sleep(0.02)
    return said


def test_the_command_is_confined_kept_running_and_goes_with_its_runner(place: Path) -> None:
    workload = WorkloadWanted(
        argv=("/bin/sh", "/data/run", "two words", 'quo"te'),
        env={"PLAIN": "plain"},
        secret_env={"SECRET": "planted"},
        mounts=(MountWanted(image_id="img_1", path="/models"),),
    )
    mounts = Path("/proc/self/mounts").read_text()
    process, log = run(place, workload)
    try:
        said = until(log, "ended with 3", 2)
    finally:
        process.kill()
        process.wait(SECONDS)
    first = said.partition("ended with 3")[0]
    assert 'args two words|quo"te' in first
    assert "env plain planted" in first
    assert "uid=1000 gid=1000" in first
    assert "pid 1\n" in first
    assert f"the weights\n{Path('/etc/hostname').read_text()}" in first
    for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
        assert line in first
    assert "Read-only file system" in first
    assert "scratch is writable" in first
    assert "tmp is writable" in first
    assert "permission denied" in first, "the command mounts nothing"
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not (place / "scratch/upper/models").exists()


def test_a_killed_runner_takes_the_command_along(place: Path) -> None:
    process, log = run(place, WorkloadWanted(argv=("/bin/sleep", "71717")))
    try:
        until(log, "starting")
        end = time.monotonic() + SECONDS
        while not (found := sleeping()):
            assert time.monotonic() < end
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
    end = time.monotonic() + SECONDS
    while sleeping():
        assert time.monotonic() < end, found


def sleeping() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == b"/bin/sleep\x0071717\x00":
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_what_cannot_be_started_is_said_and_tried_again(place: Path) -> None:
    process, log = run(place, WorkloadWanted(argv=("/no/such",), secret_env={"SECRET": "planted"}, port=1))
    try:
        said = until(log, "ended with 127", 3)
    finally:
        process.kill()
        process.wait(SECONDS)
    assert "/no/such cannot be started: [Errno 2]" in said
    assert "again in 0.1 s" in said
    assert "planted" not in said


def test_the_description_is_json_that_names_every_disk() -> None:
    workload = WorkloadWanted(argv=("a",), mounts=(MountWanted(image_id="i", path="/a"), MountWanted(image_id="j", path="/b")))
    described = json.loads(workload_text(workload))
    assert [entry["serial"] for entry in described["mounts"]] == ["mount0", "mount1"]
    assert all(len(entry["serial"]) <= 20 for entry in described["mounts"])  # virtio's limit
    assert len(described["root"]) <= 20
    assert os.access(RUNNER, os.R_OK)
