"""One connection that speaks `rpc`: requests in, answers and events out.

The one rule: a session holds requests, never work. When it ends, its requests are cancelled; jobs on objects go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from hostagent.protocol import codec, frames
from hostagent.protocol.errors import AgentError
from hostagent.protocol.frames import Answer, Cancel, Event, Request
from hostagent.protocol.verbs import Cursor
from hostagent.serve.metrics import Metrics
from hostagent.verbs import registry
from hostagent.verbs.context import Agent

logger = logging.getLogger(__name__)
MAX_DEADLINE_MS = 24 * 3_600_000


class Session:
    def __init__(self, agent: Agent, metrics: Metrics, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._agent = agent
        self._metrics = metrics
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()
        self._requests: dict[int, asyncio.Task[Answer]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._pump: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the other side closes, sends an endless line, or stops reading and is cut."""
        try:
            with contextlib.suppress(ConnectionError):
                await self._read()
        finally:
            tasks = [*self._requests.values(), *self._answering, *([self._pump] if self._pump else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:
                await self._refuse(0, "frame.too_long", f"a line is at most {frames.MAX_LINE_BYTES} bytes")
                return
            if not line.endswith(b"\n"):
                return
            try:
                frame = frames.decode(line)
            except (frames.FrameError, RecursionError) as error:
                await self._refuse(0, "frame.invalid", str(error))
                continue
            await self._take(frame)

    async def _take(self, frame: frames.Frame) -> None:
        match frame:
            case Cancel(cancel=request_id):
                task = self._requests.get(request_id)
                if task is not None:
                    task.cancel()
            case Request() if frame.id in self._requests:
                await self._refuse(frame.id, "request.duplicate", f"request {frame.id} is in flight already")
            case Request() if len(self._requests) >= frames.MAX_IN_FLIGHT:
                await self._refuse(frame.id, "busy", f"{frames.MAX_IN_FLIGHT} requests are in flight", retryable=True)
            case Request():
                self._requests[frame.id] = asyncio.create_task(self._work(frame), name=f"request {frame.verb[:40]}")
                answering = asyncio.create_task(self._answer(frame, self._requests[frame.id]))
                self._answering.add(answering)
                answering.add_done_callback(self._answering.discard)
            case _:
                await self._refuse(0, "frame.invalid", "only requests and cancels come this way")

    async def _work(self, request: Request) -> Answer:
        seconds = min(request.deadline_ms, MAX_DEADLINE_MS) / 1000
        try:
            async with asyncio.timeout(seconds):
                if request.verb == "events.subscribe":
                    return await self._subscribe(request)
                return await registry.answer(self._agent, request)
        except TimeoutError:
            return _failed(request.id, "deadline.exceeded", f"{request.verb} took over {seconds} s")
        except Exception as error:
            logger.exception("verb %s", request.verb)
            return _failed(request.id, "agent.bug", f"{type(error).__name__}: {error}")

    async def _answer(self, request: Request, work: asyncio.Task[Answer]) -> None:
        """A task of its own, because work may be cancelled before it began."""
        started = time.monotonic()
        await asyncio.wait({work})
        answer = _failed(request.id, "cancelled", f"{request.verb} was cancelled") if work.cancelled() else work.result()
        self._requests.pop(request.id, None)
        result = "ok" if answer.error is None else answer.error.code
        self._metrics.verb_done(request.verb, result, time.monotonic() - started)
        await self._send(answer)

    async def _subscribe(self, request: Request) -> Answer:
        try:
            cursor = codec.decode(Cursor, request.body)
        except codec.DecodeError as error:
            return _failed(request.id, "request.invalid", str(error), retryable=False)
        if self._pump is not None:
            return _failed(request.id, "events.subscribed", "this channel has a subscription already", retryable=False)
        if not cursor.log:
            cursor = self._agent.events.cursor
        self._pump = asyncio.create_task(self._send_events(cursor), name="events")
        return Answer(id=request.id, body=codec.encode(self._agent.events.cursor))

    async def _send_events(self, cursor: Cursor) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                for event in await self._agent.events.wait(cursor):
                    await self._send(event)
                    cursor = Cursor(log=event.log, seq=event.seq)

    async def _refuse(self, request_id: int, code: str, message: str, *, retryable: bool = False) -> None:
        await self._send(_failed(request_id, code, message, retryable=retryable))

    async def _send(self, frame: Answer | Event) -> None:
        try:
            line = frames.encode(frame)
        except frames.FrameError as error:
            assert isinstance(frame, Answer)
            line = frames.encode(_failed(frame.id, "answer.too_large", str(error), retryable=False))
        async with self._sending:
            self._writer.write(line)
            with contextlib.suppress(ConnectionError):
                await self._writer.drain()


def _failed(request_id: int, code: str, message: str, *, retryable: bool = True) -> Answer:
    return Answer(id=request_id, error=AgentError(code, message, retryable=retryable))
