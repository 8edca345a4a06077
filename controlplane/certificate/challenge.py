"""Answers http-01 challenges (RFC 8555, section 8.3): GET /.well-known/acme-challenge/<token> on port 80.

The one rule: it is open only while an authority asks, and says nothing but what it was given to say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Self

PATH = "/.well-known/acme-challenge/"
_HEAD_BYTES = 8192
_SECONDS = 10.0
_AT_ONCE = 64


class ChallengeUnanswerable(RuntimeError):
    """The listener for challenges cannot be opened; the message says why."""


@dataclass(slots=True)
class Responder:
    """`answers` maps a path to the text to answer with; another thread may fill it."""

    answers: dict[str, str] = field(default_factory=dict)
    port: int = 0
    _guests: set[asyncio.Task[None]] = field(default_factory=set)

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(cls, listen: str) -> AsyncIterator[Self]:
        """Open on `host:port`, without a host on every address of both families. Raises ChallengeUnanswerable."""
        self = cls()
        host, _, port = listen.rpartition(":")
        try:
            server = await asyncio.start_server(self._accept, host.strip("[]") or None, int(port), limit=_HEAD_BYTES)
        except (OSError, ValueError, OverflowError) as error:
            raise ChallengeUnanswerable(f"cannot listen on {listen} for the authority's challenge: {error}") from error
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for guest in self._guests:
                guest.cancel()
            await asyncio.gather(*self._guests, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._guests) >= _AT_ONCE:
            writer.close()
            return
        guest = asyncio.create_task(self._serve(reader, writer))
        self._guests.add(guest)
        guest.add_done_callback(self._guests.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            try:
                async with asyncio.timeout(_SECONDS):
                    writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                    await writer.drain()
            finally:
                writer.close()
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        text = self.answers.get(rest.partition(" ")[0]) if method in {"GET", "HEAD"} else None
        status, body = ("200 OK", text.encode()) if text is not None else ("404 Not Found", b"there is nothing here\n")
        lines = (
            f"HTTP/1.1 {status}",
            "content-type: application/octet-stream",
            f"content-length: {len(body)}",
            "connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (body if method != "HEAD" else b"")
