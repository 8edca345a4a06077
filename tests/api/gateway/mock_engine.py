"""An engine that does what a test says: real HTTP on a real socket, written by hand so that it can also break it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


@dataclass
class Seen:
    """One request as it arrived; `gone` is set when its client left before the answer was whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class Peer:
    """The answering side of one request."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.is_cut = False

    async def head(self, status: int = 200, *headers: str) -> None:
        await self.raw(f"HTTP/1.1 {status} X\r\n{''.join(h + chr(13) + chr(10) for h in headers)}\r\n".encode())

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def json(self, status: int, document: object, *headers: str) -> None:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        await self.head(status, "content-type: application/json", f"content-length: {len(body)}", *headers)
        await self.raw(body)

    async def open_stream(self) -> None:
        await self.head(200, "content-type: text/event-stream", "transfer-encoding: chunked")

    async def events(self, *events: bytes) -> None:
        for event in events:
            await self.chunk(event)

    def cut(self) -> None:
        """Reset the connection in the middle of the answer."""
        self.is_cut = True
        self._writer.transport.abort()


Answer = Callable[[Seen, Peer], Awaitable[None]]


def delta(content: str = "", **more: object) -> bytes:
    fields = {**({"content": content} if content else {}), **more}
    document = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "served"}
    document["choices"] = [{"index": 0, "delta": fields, "finish_reason": None}]
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def usage_event(usage: dict = USAGE) -> bytes:
    return b"data: " + json.dumps({"id": "c1", "choices": [], "usage": usage}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def well_behaved(seen: Seen, peer: Peer) -> None:
    """Three tokens, streamed when asked, with usage when asked."""
    if not seen.json.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "one two three"}, "finish_reason": "stop"}
        document = {
            "id": "c1",
            "object": "chat.completion",
            "created": 1,
            "model": "served",
            "choices": [choice],
            "usage": USAGE,
        }
        return await peer.json(200, document)
    await peer.open_stream()
    await peer.events(delta(role="assistant"), delta("one"), delta(" two"), delta(" three"))
    if (seen.json.get("stream_options") or {}).get("include_usage"):
        await peer.events(usage_event())
    await peer.events(DONE)
    return await peer.end()


class MockEngine:
    """`answer` may be changed between requests; `seen` is what came."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.answer: Answer = well_behaved
        self.resets_reused = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0, address: str = "127.0.0.1") -> None:
        self._server = await asyncio.start_server(self._connected, address, port, limit=64 << 20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                first = b""
                while (first := await self._one(reader, writer, first)) is not None and not self.resets_reused:
                    pass
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> bytes | None:
        head = first + await reader.readuntil(b"\r\n\r\n")
        line, *lines = head.decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if "transfer-encoding" in headers:
            while size := int(await reader.readline(), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        method, path, _ = line.split(" ")
        seen = Seen(method, path, headers, body)
        self.seen.append(seen)
        peer = Peer(writer)
        work = asyncio.ensure_future(self.answer(seen, peer))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                seen.gone.set()
                return None
            await work
            return None if peer.is_cut else (await watch or None)
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
