"""One health check of one backend at one address.

The one rule: whatever the backend does, an attempt ends within its time-out with yes or a reason. It never raises, and reads at
most MAX_ANSWER_BYTES of what a tenant's machine sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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


async def attempt(probe: ProbeWanted, address: str, port: int) -> str:
    """Why the backend is not well, in a few words; an empty text when it is."""
    try:
        async with asyncio.timeout(probe.timeout_ms / 1000):
            match probe.kind:
                case "tcp":
                    await connect(address, port)
                case "grpc":
                    from hostagent.probes.grpc import check

                    await check(probe, address, port)
                case _:
                    await _http(probe, address, port)
    except TimeoutError:
        return f"no answer within {probe.timeout_ms} ms"
    except Unhealthy as error:
        return str(error)
    except ssl.SSLError as error:
        return f"TLS: {error.reason or error}"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__
    except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
        return str(error) or type(error).__name__
    return ""


async def connect(address: str, port: int) -> None:
    """A whole handshake and a reset, so that nothing stays in TIME_WAIT on either side."""
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


@contextlib.asynccontextmanager
async def channel(
    address: str, port: int, context: ssl.SSLContext | None, name: str
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


async def _http(probe: ProbeWanted, address: str, port: int) -> None:
    context = tls(probe.is_tls_verified, "http/1.1") if probe.kind == "https" else None
    host = probe.host or (f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
    async with channel(address, port, context, probe.host) as (reader, writer):
        fields = f"Host: {host}\r\nUser-Agent: bedplate-probe\r\nAccept: */*\r\nConnection: close\r\n"
        writer.write(f"GET {probe.path} HTTP/1.1\r\n{fields}\r\n".encode("ascii"))
        head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        words = head[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise Unhealthy(f"not HTTP: {head[0][:40]!r}")
        status = int(words[1])
        if not probe.expected_status_first <= status <= probe.expected_status_last:
            raise Unhealthy(f"status {status}")
        if probe.expected_body and probe.expected_body.encode() not in await _body(head[1:], reader):
            raise Unhealthy("the body is not the expected one")


async def _body(fields: list[bytes], reader: asyncio.StreamReader) -> bytes:
    values = {name.strip().lower(): value.strip().lower() for name, _, value in (field.partition(b":") for field in fields)}
    if b"chunked" in values.get(b"transfer-encoding", b""):
        return await _chunks(reader)
    length = values.get(b"content-length", b"")
    if length.isdigit():
        return await reader.readexactly(min(int(length), MAX_ANSWER_BYTES))
    return await _until_closed(reader)


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while len(found) < MAX_ANSWER_BYTES and (piece := await reader.read(MAX_ANSWER_BYTES - len(found))):
        found += piece
    return bytes(found)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while len(found) < MAX_ANSWER_BYTES:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size <= 0:
            break
        found += await reader.readexactly(min(size, MAX_ANSWER_BYTES))
        await reader.readexactly(2)
    return bytes(found)
