"""Removes what a demo made, and counts what was there before and is there after.

The one rule: it works from the disk and from /proc alone, however the demo ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO

from provisioning.lab.lab import Lab
from provisioning.lab.model import LabError, read_record

_END_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What belongs to the demo's directory at one moment."""

    processes: int
    mounts: int
    links: int
    files: int

    def words(self) -> str:
        return ", ".join(f"{getattr(self, entry.name)} {entry.name}" for entry in fields(self))


def processes_of(directory: Path) -> list[int]:
    """Processes whose program, root or working directory is inside `directory`, or whose state directory is."""
    needle = f"{directory}/"
    variable = f"\0BEDPLATE_STATE_DIR={needle}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            places = [f"{(entry / name).readlink()}/" for name in ("root", "cwd", "exe")]
            if any(place.startswith(needle) for place in places) or variable in b"\0" + (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def _mounts(directory: Path) -> list[str]:
    points = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point.startswith(f"{directory}/")]


def _count(directory: Path, link: str) -> Counts:
    mounts = len(_mounts(directory))
    files = sum(1 for _ in directory.rglob("*")) if directory.exists() else 0
    links = int(bool(link) and Path(f"/sys/class/net/{link}").exists())
    return Counts(processes=len(processes_of(directory)), mounts=mounts, links=links, files=files)


def _end_demo(directory: Path) -> None:
    """Have a demo that is at work, or is stopping, end first: what it still writes would be written into nothing."""
    try:
        file = (directory / "demo.lock").open("r+")
    except OSError:
        return
    deadline = time.monotonic() + _END_SECONDS
    with file:
        is_told = False
        while not _is_free(file):
            with contextlib.suppress(ValueError, ProcessLookupError):
                pid = int(file.read().strip())
                if not is_told or time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL if is_told else signal.SIGTERM)
                    is_told = True
            file.seek(0)
            time.sleep(0.1)


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_control_plane(directory: Path) -> None:
    """Ask a running `up` to stop; what does not end in time is killed."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((directory / "state/up.lock").read_text())
        if str(directory) in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGINT)
            deadline = time.monotonic() + _END_SECONDS
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.1)


def _remove_account(directory: Path) -> None:
    """PostgreSQL's account goes with the demo that made it, unless something else runs under it by now."""
    if (directory / "made-account").exists():
        subprocess.run(["userdel", "bedplate-pg"], check=False, capture_output=True)


def clean(directory: Path, *, before_a_new_run: bool = False) -> int:
    """Remove everything and say so; the exit code is 1 when something is left."""
    _end_demo(directory)
    record = read_record(directory / "lab") if (directory / "lab").exists() else None
    link = record.link if record is not None else ""
    before = _count(directory, link)
    _end_control_plane(directory)
    if record is not None:
        try:
            Lab.found(directory / "lab").clean()
        except (LabError, OSError) as error:
            print(f"the lab could not be removed: {error}", file=sys.stderr)
    for pid in processes_of(directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    for point in reversed(_mounts(directory)):
        subprocess.run(["umount", point], check=False, capture_output=True)
    if not _mounts(directory):  # never delete through a mount
        _remove_account(directory)
        shutil.rmtree(directory, ignore_errors=True)
    after = _count(directory, link)
    if before_a_new_run:
        print("removed what an earlier demo left", file=sys.stderr)
    else:
        print(f"before: {before.words()}\nafter:  {after.words()}")
        print("kept: installed packages, the Python environment, cached images and models", file=sys.stderr)
    return int(any(getattr(after, entry.name) for entry in fields(after)))
