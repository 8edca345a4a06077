"""One log file for each supervised process, and its lines on the terminal when asked.

The one rule: files are turned over at 16 MiB and one old file is kept, so that logs cannot fill a disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_LARGEST_BYTES = 16 << 20
_LINE_BYTES = 64 << 10
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)


class Log:
    """The log of one process."""

    def __init__(self, path: Path, name: str, *, echo: bool) -> None:
        self._path = path
        self._prefix = _prefix(name) if echo else None
        self._file = self._open()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        if self._file < 0:
            return
        os.write(self._file, data)
        if os.fstat(self._file).st_size > _LARGEST_BYTES:
            self._path.replace(self._path.with_suffix(".log.1"))
            os.close(self._file)
            self._file = self._open()
        if self._prefix is not None:
            for line in data.decode(errors="replace").splitlines():
                print(f"{self._prefix}{line}", file=sys.stderr)

    def tail(self, lines: int = 15) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, self._path.stat().st_size - _LINE_BYTES))
                return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
        except OSError as error:
            return str(error)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _prefix(name: str) -> str:
    text = f"{name:<10} | "
    if not sys.stderr.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_COLOURS[sum(name.encode()) % len(_COLOURS)]}m{text}\x1b[0m"
