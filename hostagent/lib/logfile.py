"""Logs that tenants fill: kept within bounds by whoever looks at their writer. The one rule: the last words stay."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 16 << 20
KEPT_BYTES = 1 << 20


def trim(path: Path, *, most_bytes: int = MOST_BYTES, kept_bytes: int = KEPT_BYTES) -> bool:
    """Cut a log that is longer than `most_bytes` down to its last `kept_bytes`, whole lines; True when it was cut.

    The writer goes on meanwhile and must append (O_APPEND); what it writes between copy and cut is lost.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        if size <= most_bytes:
            return False
        tail = os.pread(descriptor, kept_bytes, size - kept_bytes)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, tail[tail.find(b"\n") + 1 :])
    finally:
        os.close(descriptor)
    return True
