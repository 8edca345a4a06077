"""One SSH channel that speaks the agent's JSON lines, and one that carries raw bytes.

The one rule: a channel that breaks fails everybody who waits on it, at once and with the cause in words.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncssh

from controlplane.remote.link import HostUnreachable
from hostagent.protocol import codec, frames
from hostagent.protocol.errors import AgentError
from hostagent.protocol.frames import Answer, Cancel, Event, Request
from hostagent.protocol.verbs import ANSWER, Cursor

ANSWER_MARGIN_SECONDS = 5.0
_EVENTS_KEPT = 10_000


class RpcChannel:
    """Requests by id over one `rpc` session. `events` fills after a subscription."""

    def __init__(self, host_id: str, writer: Any, reader: Any, stderr: Any, on_close: Callable[[], None]) -> None:
        self._host_id = host_id
        self._writer = writer
        self._reader = reader
        self._stderr = stderr
        self._on_close = on_close
        self._ids = 0
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._slots = asyncio.Semaphore(frames.MAX_IN_FLIGHT)
        self.events: asyncio.Queue[Event | HostUnreachable] = asyncio.Queue(_EVENTS_KEPT)
        self.is_open = True
        self._reading = asyncio.create_task(self._read(), name=f"rpc {host_id}")

    async def call(self, verb: str, body: object, deadline_seconds: float) -> Any:
        """Raises AgentError, and HostUnreachable when no answer comes in time or the channel breaks."""
        try:
            async with asyncio.timeout(deadline_seconds + ANSWER_MARGIN_SECONDS), self._slots:
                answer = await self._exchange(verb, body, deadline_seconds)
        except TimeoutError:
            raise HostUnreachable(self._host_id, f"no answer to {verb} within {deadline_seconds:g} s") from None
        if answer.error is not None:
            raise answer.error
        try:
            return codec.decode(ANSWER[verb], answer.body)
        except codec.DecodeError as error:
            message = f"the agent's answer to {verb} is not understood: {error}"
            raise AgentError("answer.not_understood", message) from error

    async def _exchange(self, verb: str, body: object, deadline_seconds: float) -> Answer:
        if not self.is_open:
            raise HostUnreachable(self._host_id, "the channel is closed")
        self._ids += 1
        request_id = self._ids
        request = Request(id=request_id, verb=verb, deadline_ms=int(deadline_seconds * 1000), body=codec.encode(body))
        line = frames.encode(request)
        waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            self._write(line)
            with contextlib.suppress(OSError, asyncssh.Error):
                await self._writer.drain()
            return await waiter
        except asyncio.CancelledError:
            self._write(frames.encode(Cancel(cancel=request_id)))
            raise
        finally:
            self._waiting.pop(request_id, None)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            self._writer.write(line)

    async def _read(self) -> None:
        detail = "the connection broke"
        try:
            while line := await self._reader.readline():
                self._take(frames.decode(line))
            said = (await self._stderr.read()).decode(errors="replace").strip()
            detail = said[:500] or "the agent closed the channel"
        except frames.FrameError as error:
            detail = f"the agent sent what is no frame: {error}"
        except (OSError, asyncssh.Error, asyncio.IncompleteReadError) as error:
            detail = str(error) or type(error).__name__
        finally:
            self._fail(detail)

    def _take(self, frame: frames.Frame) -> None:
        if isinstance(frame, Answer):
            waiter = self._waiting.get(frame.id)
            if waiter is not None and not waiter.done():
                waiter.set_result(frame)
        elif isinstance(frame, Event):
            try:
                self.events.put_nowait(frame)
            except asyncio.QueueFull:  # nobody reads: the next subscription starts over
                self._writer.close()

    def _fail(self, detail: str) -> None:
        self.is_open = False
        error = HostUnreachable(self._host_id, detail)
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
        with contextlib.suppress(asyncio.QueueFull):
            self.events.put_nowait(error)
        self._writer.close()
        self._on_close()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


class Subscription:
    """Events of one host after a cursor; `cursor` moves with what was handed out."""

    def __init__(self, channel: RpcChannel, cursor: Cursor) -> None:
        self._channel = channel
        self.cursor = cursor

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            item = await self._channel.events.get()
            if isinstance(item, HostUnreachable):
                raise item
            self.cursor = Cursor(log=item.log, seq=item.seq)
            yield item

    async def close(self) -> None:
        await self._channel.close()


class ByteStream:
    """Raw bytes of a `stream` session."""

    def __init__(self, host_id: str, writer: Any, reader: Any, on_close: Callable[[], None]) -> None:
        self._host_id = host_id
        self._writer = writer
        self._reader = reader
        self._on_close = on_close

    async def read(self, limit: int = 65_536) -> bytes:
        with self._words():
            return await self._reader.read(limit)

    async def read_line(self) -> bytes:
        with self._words():
            return await self._reader.readline()

    async def write(self, data: bytes) -> None:
        with self._words():
            self._writer.write(data)
            await self._writer.drain()

    async def write_eof(self) -> None:
        with self._words():
            self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()
        self._on_close()

    @contextlib.contextmanager
    def _words(self) -> Iterator[None]:
        try:
            yield
        except (OSError, asyncssh.Error) as error:
            raise HostUnreachable(self._host_id, f"the stream broke: {error or type(error).__name__}") from error
