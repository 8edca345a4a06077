"""Which process is meant: a pid alone is reused, a pid with its start time and the boot's id is not.

The one rule: whoever remembers a process remembers an `Incarnation`, and asks `is_alive` before trusting it.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """`start_ticks` is field 22 of /proc/PID/stat: clock ticks since boot."""

    pid: int
    start_ticks: int
    boot_id: str


@cache
def kernel_boot_id() -> str:
    """The kernel's id of this boot. A lab host has one of its own: see `hostagent.lib.paths.Paths.boot_id`."""
    return BOOT_ID.read_text(encoding="ascii").strip()


def start_ticks(pid: int) -> int | None:
    """None when no such process exists, or only its zombie is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return int(fields[19])


def incarnation_of(pid: int, boot_id: str = "") -> Incarnation | None:
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    return Incarnation(pid=pid, start_ticks=ticks, boot_id=boot_id or kernel_boot_id())


def is_alive(incarnation: Incarnation, boot_id: str = "") -> bool:
    """Whether exactly this process still runs; a reused pid or another boot is not it."""
    if incarnation.boot_id != (boot_id or kernel_boot_id()):
        return False
    return start_ticks(incarnation.pid) == incarnation.start_ticks


def open_pidfd(incarnation: Incarnation, boot_id: str = "") -> int | None:
    """A descriptor that becomes readable when the process ends; None when it is gone already. The caller closes it."""
    try:
        descriptor = os.pidfd_open(incarnation.pid)
    except ProcessLookupError:
        return None
    if not is_alive(incarnation, boot_id):
        os.close(descriptor)
        return None
    return descriptor


def send_signal(incarnation: Incarnation, number: signal.Signals, boot_id: str = "") -> bool:
    """Signal exactly this process; False when it is gone."""
    descriptor = open_pidfd(incarnation, boot_id)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
