"""HTTP/1.1 over a UNIX socket: one request on one connection, with a deadline, and descriptors beside its body.

The one rule: a body that is not wanted is not sent (Cloud Hypervisor refuses even an empty object), and any 2xx is success.
Source: RFC 9112; unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 65_536
MOST_BYTES = 4 << 20


class UnixHttpError(Exception):
    """`status` is the answer's, or 0 when there was none; the message has the server's chain of causes, outermost first."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixHttp:
    """A server behind `socket_path`, its paths below `prefix`."""

    socket_path: Path
    prefix: str = "/api/v1"

    async def call(
        self, method: str, name: str, body: Any = None, *, descriptors: tuple[int, ...] = (), seconds: float = 10.0
    ) -> Any:
        """What it answered, None when that is nothing. Raises UnixHttpError."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {self.prefix}/{name} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        try:
            async with asyncio.timeout(seconds):
                status, answer = await _exchange(self.socket_path, f"{head}\r\n".encode() + content, descriptors)
        except TimeoutError:
            raise UnixHttpError(0, f"no answer to {name} in {seconds:g} s") from None
        except (OSError, ValueError) as error:
            raise UnixHttpError(0, f"{name}: {error!r}") from error
        if not 200 <= status < 300:
            raise UnixHttpError(status, f"{name}: {_causes(answer)}")
        return json.loads(answer) if answer.strip() else None


async def accepts(socket_path: Path, *, seconds: float) -> bool:
    """Whether somebody takes connections there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_connect(connection, str(socket_path))
    except (OSError, TimeoutError):
        return False
    finally:
        connection.close()
    return True


async def _exchange(socket_path: Path, request: bytes, descriptors: tuple[int, ...]) -> tuple[int, bytes]:
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await loop.sock_connect(connection, str(socket_path))
        if descriptors:
            sent = socket.send_fds(connection, [request], list(descriptors))
            request = request[sent:]
        if request:  # sending nothing to a server that has answered and closed is an error too
            await loop.sock_sendall(connection, request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += await _chunk(connection)
        head, _, content = received.partition(b"\r\n\r\n")
        status, length = _head(head)
        while len(content) < length:
            content += await _chunk(connection)
    finally:
        connection.close()
    return status, content


async def _chunk(connection: socket.socket) -> bytes:
    chunk = await asyncio.get_running_loop().sock_recv(connection, READ_BYTES)
    if not chunk:
        raise ConnectionResetError("the server closed the connection")
    return chunk


def _head(head: bytes) -> tuple[int, int]:
    """Status and length of the body. Raises ValueError."""
    first, *lines = head.decode("ascii").split("\r\n")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(fields.get("content-length", "0"))
    if length > MOST_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    return int(first.split(" ")[1]), length


def _causes(answer: bytes) -> str:
    text = answer.decode(errors="replace").strip()
    try:
        causes = json.loads(text)
    except ValueError:
        return text
    return ": ".join(map(str, causes)) if isinstance(causes, list) else text
