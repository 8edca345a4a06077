"""Relays console, log and port streams between the API and the hosts over a local socket.

The one rule: a connection says one line with its ticket, hears one line of JSON, and is raw bytes from then on. A ticket
opens one stream, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from pathlib import Path

from controlplane.core import json
from controlplane.core.clock import Clock
from controlplane.core.sealing import Sealer
from controlplane.core.ticket import TICKET_SECONDS, StreamTicket, TicketRefused, redeem
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable, Stream
from hostagent.protocol.verbs import StreamRequest

logger = logging.getLogger(__name__)
HELLO_SECONDS = 10.0
OPEN_SECONDS = 15.0
CHUNK_BYTES = 65_536
SILENCE_SECONDS = 60.0


class Relay:
    def __init__(self, links: HostLinks, sealer: Sealer, clock: Clock) -> None:
        self._links = links
        self._sealer = sealer
        self._clock = clock
        self._used: dict[str, float] = {}

    async def listen(self, path: Path) -> asyncio.Server:
        """Only the deployment's own user may connect."""
        await asyncio.to_thread(_clear, path)
        server = await asyncio.start_unix_server(self.accept, path)
        await asyncio.to_thread(path.chmod, 0o600)
        return server

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            try:
                async with asyncio.timeout(HELLO_SECONDS):
                    hello = json.loads(await reader.readline())
                ticket = self._redeem(hello["ticket"] if isinstance(hello, dict) else None)
                stream = await self._open(ticket)
            except (TimeoutError, ValueError, KeyError, TicketRefused) as error:
                await _say(writer, {"ok": False, "code": "stream.ticket_refused", "message": str(error)})
            except AgentError as error:
                await _say(writer, {"ok": False, "code": error.code, "message": error.message})
            except (HostUnreachable, HostKeyChanged) as error:
                await _say(writer, {"ok": False, "code": "host.unreachable", "message": str(error)})
            else:
                await _say(writer, {"ok": True})
                await _pump(reader, writer, stream)
        writer.close()

    def _redeem(self, text: object) -> StreamTicket:
        ticket = redeem(self._sealer, self._clock, str(text))
        now = self._clock.now().timestamp()
        self._used = {nonce: until for nonce, until in self._used.items() if until > now}
        if ticket.nonce in self._used:
            raise TicketRefused("the ticket was used already")
        self._used[ticket.nonce] = now + TICKET_SECONDS
        return ticket

    async def _open(self, ticket: StreamTicket) -> Stream:
        logger.info("stream %s of %s for %s", ticket.kind, ticket.object_id, ticket.user_id)
        request = StreamRequest(
            kind=ticket.kind, id=ticket.object_id, port=ticket.port, offset=ticket.tail_bytes, follow=ticket.follow
        )
        return await self._links.open_stream(ticket.host_id, request, deadline_seconds=OPEN_SECONDS)


def own_socket(shared: Path) -> Path:
    """A name beside `shared` that no other watch has: several may serve one deployment. Dead ones' are removed."""
    for other in shared.parent.glob(f"{shared.stem}-*{shared.suffix}"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(other))
            except ConnectionRefusedError:
                other.unlink()
    return shared.with_name(f"{shared.stem}-{secrets.token_hex(4)}{shared.suffix}")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> None:
    async def outward() -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await stream.write(chunk)
        await stream.write_eof()

    has_heard = True

    async def inward() -> None:
        nonlocal has_heard
        while chunk := await stream.read(CHUNK_BYTES):
            has_heard = True
            writer.write(chunk)
            await writer.drain()

    near, far = asyncio.create_task(outward()), asyncio.create_task(inward())
    try:
        await asyncio.wait({near, far}, return_when=asyncio.FIRST_COMPLETED)
        while near.done() and near.exception() is None and not far.done() and has_heard:
            has_heard = False  # our side has said all, or is gone: the host may still answer, but not be silent for ever
            await asyncio.wait({far}, timeout=SILENCE_SECONDS)
    finally:
        near.cancel()
        far.cancel()
        await asyncio.gather(near, far, return_exceptions=True)
        await stream.close()


async def _say(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
    writer.write(json.dumps(body) + b"\n")
    await writer.drain()


def _clear(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
