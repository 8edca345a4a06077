"""A client of QMP (QEMU and qemu-storage-daemon): one short connection for a few commands, or one held for events.

The one rule: every word has a deadline; a monitor serves one client, and a stuck daemon must never hold the agent.
Source: QEMU, docs/interop/qmp-spec.txt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

COMMAND_SECONDS = 10.0
READ_BYTES = 65_536


class QmpError(Exception):
    """`kind` is QMP's error class, or `unreachable`, `closed`, `timeout`."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {message}")


class Qmp:
    """Made by `connect`. Events that arrive while a command waits are kept in `events`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self.events: list[dict[str, Any]] = []

    async def execute(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        descriptor: int | None = None,
        seconds: float = COMMAND_SECONDS,
    ) -> Any:
        """What the command returned; a `descriptor` travels with it (SCM_RIGHTS, for `getfd`). Raises QmpError."""
        line = json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n"
        try:
            async with asyncio.timeout(seconds):
                await self._send(line, descriptor)
                while True:
                    message = await self._message()
                    if "event" in message:
                        self.events.append(message)
                    elif "error" in message:
                        raise QmpError(message["error"]["class"], f"{command}: {message['error']['desc']}")
                    elif "return" in message:
                        return message["return"]
        except TimeoutError:
            raise QmpError("timeout", f"no answer to {command} in {seconds} s") from None

    async def wait_for(self, event: str, *, seconds: float) -> dict[str, Any]:
        """The next event of this name, also one that arrived before. Raises QmpError."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for message in self.events:
                        if message["event"] == event:
                            self.events.remove(message)
                            return message
                    message = await self._message()
                    if "event" in message:
                        self.events.append(message)
        except TimeoutError:
            raise QmpError("timeout", f"no {event} in {seconds} s") from None

    async def _send(self, line: bytes, descriptor: int | None) -> None:
        try:
            if descriptor is None:
                await asyncio.get_running_loop().sock_sendall(self._connection, line)
            else:
                socket.send_fds(self._connection, [line], [descriptor])
        except OSError as error:
            raise QmpError("closed", str(error)) from error

    async def _message(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            try:
                chunk = await asyncio.get_running_loop().sock_recv(self._connection, READ_BYTES)
            except OSError as error:
                raise QmpError("closed", str(error)) from error
            if not chunk:
                raise QmpError("closed", "the monitor closed the connection")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


@contextlib.asynccontextmanager
async def connect(path: Path, *, seconds: float = COMMAND_SECONDS) -> AsyncIterator[Qmp]:
    """A monitor in command mode. Raises QmpError when nobody listens, or another client holds it for `seconds`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        qmp = Qmp(connection)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_connect(connection, str(path))
                await qmp._message()  # noqa: SLF001 - the greeting
        except (OSError, TimeoutError) as error:
            raise QmpError("unreachable", f"{path}: {error!r}") from error
        await qmp.execute("qmp_capabilities", seconds=seconds)
        yield qmp
    finally:
        connection.close()
