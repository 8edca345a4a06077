"""The gRPC health check (grpc.health.v1.Health/Check) over HTTP/2 without TLS, by h2.

The one rule: h2 is imported by the first check and by nothing else. Source: grpc/doc/health-checking.md and PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from hostagent.probes.channel import MAX_ANSWER_BYTES, Unhealthy, authority_of, opened
from hostagent.protocol.network import ProbeWanted

SERVING = 1
_WORDS = {0: "UNKNOWN", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_CODES = {"5": "NOT_FOUND", "12": "UNIMPLEMENTED", "14": "UNAVAILABLE"}


async def check(probe: ProbeWanted, address: str, port: int) -> None:
    """Raises Unhealthy, or what the transport raises."""
    connection = await _connection()
    async with opened(address, port) as (reader, writer):
        connection.initiate_connection()
        connection.send_headers(1, _headers(authority_of(probe, address, port)))
        connection.send_data(1, _request(probe.service), end_stream=True)
        writer.write(connection.data_to_send())
        status, body = await _exchange(connection, reader, writer)
    if status != "0":
        raise Unhealthy(f"gRPC status {_CODES.get(status, status or 'missing')}")
    serving = _status_of(body)
    if serving != SERVING:
        raise Unhealthy(_WORDS.get(serving, f"status {serving}"))


async def _connection() -> Any:
    # Compiling it out of the agent's file takes long: not in the event loop.
    h2 = await asyncio.to_thread(importlib.import_module, "h2.connection")
    configuration = importlib.import_module("h2.config").H2Configuration(client_side=True, header_encoding="utf-8")
    return h2.H2Connection(config=configuration)


def _headers(authority: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/grpc.health.v1.Health/Check"),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "bedplate-probe"),
    ]


async def _exchange(connection: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bytes]:
    """(grpc-status, the body) when the stream ended."""
    errors = importlib.import_module("h2.exceptions")
    status, body, received = "", bytearray(), 0
    while received < MAX_ANSWER_BYTES:
        data = await reader.read(MAX_ANSWER_BYTES)
        if not data:
            raise EOFError("closed before the answer")
        received += len(data)
        try:
            events = connection.receive_data(data)
        except errors.ProtocolError as error:
            raise Unhealthy(f"not HTTP/2: {error}") from error
        for event in events:
            kind = type(event).__name__
            if kind in ("ResponseReceived", "TrailersReceived"):
                status = dict(event.headers).get("grpc-status", status)
            elif kind == "DataReceived":
                body += event.data
            elif kind in ("StreamReset", "ConnectionTerminated"):
                raise Unhealthy("reset by the server")
            elif kind == "StreamEnded":
                return status, bytes(body)
        writer.write(connection.data_to_send())
    raise Unhealthy("an answer without end")


def _request(service: str) -> bytes:
    """HealthCheckRequest { string service = 1; }, not compressed."""
    name = service.encode()
    message = b"\x0a" + _varint(len(name)) + name if name else b""
    return b"\x00" + len(message).to_bytes(4, "big") + message


def _status_of(body: bytes) -> int:
    """HealthCheckResponse { ServingStatus status = 1; }: absent is UNKNOWN."""
    length = int.from_bytes(body[1:5], "big")
    message = body[5 : 5 + length]
    if len(body) < 5 or body[0] != 0 or len(message) != length or (message and message[0] != 0x08):
        raise Unhealthy("not a HealthCheckResponse")
    return message[1] if len(message) > 1 else 0


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))
