"""A command at a terminal of its own, as a person has it: what is typed goes in, what is shown is waited for."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence


class Terminal:
    """`seen` is all that was shown, the echo of what was typed included."""

    def __init__(self, process: subprocess.Popen[bytes], ours: int, theirs: int) -> None:
        self.process = process
        self.seen = b""
        self._ours = ours
        self._theirs = theirs
        self._looked = 0

    def modes(self) -> list[object]:
        """How the terminal is set: raw, echo and the like."""
        return termios.tcgetattr(self._theirs)

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def expect(self, text: bytes, seconds: float = 60) -> None:
        """Until it is shown behind what was waited for before."""
        end = time.monotonic() + seconds
        while (at := self.seen.find(text, self._looked)) < 0:
            assert self._read(end - time.monotonic()), f"{text!r} was not shown: {self.seen[-2000:]!r}"
        self._looked = at + len(text)

    def insist(self, typed: bytes, text: bytes, tries: int = 20, seconds: float = 3) -> None:
        """Type it again until the answer is shown: whoever listens may not be there yet."""
        for left in reversed(range(tries)):
            self.type(typed)
            try:
                return self.expect(text, seconds)
            except AssertionError:
                if not left:
                    raise
        return None

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, seconds))
        if not ready:
            return False
        data = os.read(self._ours, 65_536)
        self.seen += data
        return bool(data)


@contextlib.contextmanager
def opened(argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[Terminal]:
    """The command at work, with the terminal as its only input and output; killed at the end when it still runs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, env=dict(environment), start_new_session=True, close_fds=True
    )
    try:
        yield Terminal(process, ours, theirs)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)
        os.close(ours)
        os.close(theirs)
