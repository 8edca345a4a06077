"""The HTTP and HTTPS check: one GET, its status, and a part of its body. The one rule: MAX_ANSWER_BYTES are read at most."""

from __future__ import annotations

import asyncio

from hostagent.probes.channel import MAX_ANSWER_BYTES, Unhealthy, authority_of, opened, tls
from hostagent.protocol.network import ProbeWanted


async def check(probe: ProbeWanted, address: str, port: int) -> None:
    """Raises Unhealthy, or what the transport raises."""
    context = tls(probe.is_tls_verified, "http/1.1") if probe.kind == "https" else None
    host = authority_of(probe, address, port)
    async with opened(address, port, context, probe.host) as (reader, writer):
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
