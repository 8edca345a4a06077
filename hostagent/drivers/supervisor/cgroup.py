"""What of a process can be limited on this host: cgroup v1, v2, or both at once.

The one rule: a controller counts only where its hierarchy is mounted and can be written; what cannot be limited is said.
"""

from __future__ import annotations

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def writable_hierarchies(mounts: Path = MOUNTS) -> dict[str, Path]:
    """Mount points by controller name (`memory`, `cpu`, `pids` …). A controller that v2 does not have is v1's, or nobody's."""
    found: dict[str, Path] = {}
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        place, (kind, _, options) = Path(left.split(" ")[4]), right.split(" ", 2)
        if kind not in ("cgroup", "cgroup2") or not os.access(place, os.W_OK):
            continue
        if kind == "cgroup2":
            controllers = (place / "cgroup.controllers").read_text(encoding="ascii").split()
        else:
            controllers = [word for word in options.split(",") if "=" not in word and word not in ("rw", "ro", "xattr", "none")]
        for controller in controllers:
            found.setdefault(controller, place)
    return found
