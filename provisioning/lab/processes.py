"""Ending processes for certain, and never the wrong ones: a pid counts only with its start time."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

from provisioning.lab.model import LabError

END_SECONDS = 20.0


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)); None for no process or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, ticks: int) -> bool:
    return pid > 0 and start_ticks(pid) == ticks


def end_everything(pid: int, ticks: int) -> None:
    """Kills a pid 1 and returns when it has ended; the kernel ends everything in its pid namespace first."""
    if pid <= 0:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_ticks(pid) != ticks:
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not select.select([descriptor], [], [], END_SECONDS)[0]:
            raise LabError(f"process {pid} is still there {END_SECONDS:.0f} s after SIGKILL")
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
