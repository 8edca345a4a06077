"""A cgroup for every host in every hierarchy the machine has (v1, v2 or both).

The one rule: a host sees its own cgroup as the root (cgroup namespace), so nothing it makes lies elsewhere.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from provisioning.lab.model import LabError

REMOVE_SECONDS = 10.0
BASE = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted hierarchy; `options` are its mount options of cgroup v1 (`cpu,cpuacct`, `none,name=systemd`)."""

    mount: Path
    kind: str
    options: str

    def config(self, lab_id: str, host: str) -> dict[str, str]:
        at = "" if self.mount == BASE else str(self.mount.relative_to(BASE))
        return {"path": str(path_of(self, lab_id, host)), "kind": self.kind, "options": self.options, "at": at}


def path_of(hierarchy: Hierarchy, lab_id: str, host: str) -> Path:
    return hierarchy.mount / f"bedplate-lab-{lab_id}" / host


def hierarchies() -> list[Hierarchy]:
    """What is mounted below /sys/fs/cgroup with its root visible and writable; empty where nothing is."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        _, _, _, root, place, flags = left.split(" ")[:6]
        kind, _, options = right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2") or root != "/" or not Path(place).is_relative_to(BASE):
            continue
        if "rw" not in flags.split(","):
            continue
        words = [word for word in options.split(",") if word not in ("rw", "xattr", "nsdelegate", "memory_recursiveprot")]
        words = [word for word in words if not word.startswith("release_agent=")]
        if any(word.startswith("name=") for word in words):
            words = ["none", *[word for word in words if word.startswith("name=")]]
        found.append(Hierarchy(mount=Path(place), kind=kind, options=",".join(words) if kind == "cgroup" else ""))
    return found


def make_cgroups(lab_id: str, host: str, found: list[Hierarchy]) -> None:
    for hierarchy in found:
        path = path_of(hierarchy, lab_id, host)
        path.mkdir(parents=True, exist_ok=True)
        for level in (path.parent, path):  # a v1 cpuset takes no process before it has CPUs and memory nodes
            for name in ("cpuset.cpus", "cpuset.mems"):
                if hierarchy.kind == "cgroup" and (level / name).exists() and not (level / name).read_text().strip():
                    (level / name).write_text((level.parent / name).read_text())


def remove_cgroups(paths: list[str]) -> None:
    """Kills what is left inside, then removes from the leaves up; absent is success."""
    end = time.monotonic() + REMOVE_SECONDS
    for text in paths:
        while Path(text).exists():
            for directory, _, _ in os.walk(text, topdown=False):
                _empty(Path(directory))
            if not Path(text).exists():
                break
            if time.monotonic() > end:
                raise LabError(f"{text} cannot be removed: {_processes(Path(text))}")
            time.sleep(0.02)


def _processes(directory: Path) -> list[int]:
    try:
        return [int(word) for word in (directory / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _empty(directory: Path) -> None:
    for pid in _processes(directory):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    try:
        directory.rmdir()
    except OSError:
        return
