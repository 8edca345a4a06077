"""How a check reaches a backend: handshakes, streams, TLS, and what is said when the answer is the wrong one.

The one rule: what was opened for a check is cut at its end, so that nothing stays in TIME_WAIT on either side.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from functools import cache

from hostagent.protocol.network import ProbeWanted

MAX_ANSWER_BYTES = 1 << 16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Unhealthy(Exception):
    """The backend answered, and the answer is not the wanted one."""


async def connect(address: str, port: int) -> None:
    """A whole handshake and a reset."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as channel:
        channel.setblocking(False)
        await asyncio.get_running_loop().sock_connect(channel, (address, port))
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)


@cache
def tls(is_verified: bool, protocol: str) -> ssl.SSLContext:
    """`protocol`: what is offered by ALPN."""
    context = ssl.create_default_context()
    if not is_verified:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([protocol])
    return context


def authority_of(probe: ProbeWanted, address: str, port: int) -> str:
    """Whom a request is for: the host that the probe names, else the place itself."""
    return probe.host or (f"[{address}]:{port}" if ":" in address else f"{address}:{port}")


@contextlib.asynccontextmanager
async def opened(
    address: str, port: int, context: ssl.SSLContext | None = None, name: str = ""
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A stream that is cut, not said good-bye to, at the end."""
    server_name = (name or address) if context else None
    reader, writer = await asyncio.open_connection(
        address, port, ssl=context, server_hostname=server_name, limit=MAX_ANSWER_BYTES
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
