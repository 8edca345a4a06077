"""A child process under asyncio, watched by pidfd.

The one rule: `wait` means that the process itself has ended, whoever still holds its pipe (asyncio's own waits for both).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Callable

_CHUNK_BYTES = 64 << 10


class Process:
    """Leads a session of its own; gets `death_signal` when we are gone (setpriv(1)). Its output goes to `write`."""

    def __init__(
        self,
        argv: tuple[str, ...],
        *,
        environment: dict[str, str],
        write: Callable[[bytes], None],
        death_signal: signal.Signals = signal.SIGKILL,
        account: pwd.struct_passwd | None = None,
    ) -> None:
        """Start it. Raises OSError."""
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._output, theirs = os.pipe()
        try:
            self._popen = subprocess.Popen(
                ("setpriv", "--pdeathsig", death_signal.name.removeprefix("SIG"), "--", *argv),
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                cwd="/",
                env=environment,
                start_new_session=True,
                user=account and account.pw_uid,
                group=account and account.pw_gid,
                extra_groups=[] if account else None,
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self._output, False)
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._on_end)
        self._loop.add_reader(self._output, self._on_output)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL to it and to all that it started and did not move to another session."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit code; negative: ended by that signal."""
        await self._ended.wait()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def drain(self) -> None:
        """Take what is left of the output and close it."""
        while self._output >= 0 and self._on_output():
            pass
        self._close_output()

    def _on_end(self) -> None:
        self.kill()  # what it left; its pid is not given to others before the next line
        self._popen.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set()

    def _on_output(self) -> bool:
        """Pass one chunk on; whether there was one."""
        try:
            chunk = os.read(self._output, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if chunk:
            self._write(chunk)
            return True
        self._close_output()
        return False

    def _close_output(self) -> None:
        if self._output >= 0:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = -1
