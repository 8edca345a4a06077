"""The connection to replicas: pooled, and honest about what a failure means.

The one rule: a request is sent again only when no replica can have seen it: nothing accepted the connection, or a pooled
connection turned out to be dead (its other end went away without a word, as containers and hosts do).
"""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from controlplane.gateway.call import Call

_KEPT_BACK = frozenset(
    b"authorization cookie host content-length accept-encoding connection keep-alive proxy-authenticate proxy-authorization"
    b" proxy-connection te trailer transfer-encoding upgrade x-api-key api-key x-request-id x-bedplate-route expect".split()
)
_SEND_AT_ONCE_BYTES = 1 << 20
_KEEP_IDLE_SECONDS = 3.0  # engines close idle connections after 5 s; a request must not meet that
_DEAD_CONNECTIONS = 8
_NOT_CONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class NotConnected(Exception):
    """The replica could not be connected to, and saw nothing of the request."""


@dataclass(slots=True)
class _Use:
    """Whether a request went out on a connection that had carried another before."""

    is_reused: bool = False


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _parameters: object) -> None:
    context.trace_request_ctx.is_reused = True


def open_session() -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_SECONDS, use_dns_cache=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=65_536,
        max_field_size=65_536,
        trace_configs=[trace],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """What is sent, and where; `pieces`: begins the body anew for each try."""

    url: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    pieces: Callable[[], AsyncIterator[bytes]] | None = None


async def send(session: aiohttp.ClientSession, letter: Letter, *, connect_seconds: float) -> aiohttp.ClientResponse:
    """The replica's answer as soon as its status is there; raises NotConnected, else what aiohttp raises."""
    body = letter.body
    for left in reversed(range(_DEAD_CONNECTIONS)):
        use = _Use()
        try:
            return await session.post(
                letter.url,
                data=letter.pieces() if letter.pieces else body if len(body) < _SEND_AT_ONCE_BYTES else io.BytesIO(body),
                headers=letter.headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_seconds),
                allow_redirects=False,
                trace_request_ctx=use,
            )
        except _NOT_CONNECTED as error:
            raise NotConnected(str(error)) from error
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
            if not (use.is_reused and left):
                raise
    raise AssertionError("the last try returns or raises")


def headers_for(call: Call) -> list[tuple[str, str]]:
    """The client's headers without credentials and what belongs to its own connection (RFC 9110, section 7.6.1)."""
    named = {name.strip().lower() for name in (call.header(b"connection") or b"").split(b",")}
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in call.request_headers
        if name not in _KEPT_BACK and name not in named
    ]
    headers.append(("accept-encoding", "identity"))
    headers.append(("x-request-id", call.request_id.decode()))
    headers.append(("x-bedplate-route", call.decision.decode("latin-1")))
    return headers
