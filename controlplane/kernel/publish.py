"""After a commit: `run X may be due`, said to the workers. The one rule: losing it costs latency, never work.

A thread of its own sends through Celery, because the broker's client blocks (100 ms at most, no retry). NOTIFY goes out
only when that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from celery import Celery

log = logging.getLogger(__name__)
ADVANCE = "bedplate.advance"
SWEEP = "bedplate.sweep"
RECONCILE = "bedplate.reconcile"
COMMON_QUEUE = "bedplate"
SOCKET_SECONDS = 0.1
_SULK_SECONDS = 1.0  # after a failure nothing is tried for this long: NOTIFY carries all

Notify = Callable[[str], Awaitable[object]]


def queue_of(shard: int) -> str:
    """The queue that only the worker holding this shard reads."""
    return f"bedplate.shard.{shard}"


def broker_url(url: str) -> str:
    """Celery's spelling of a Redis URL: `unix:///path?db=0` is `redis+socket:///path?virtual_host=0` there."""
    if url.startswith("unix://"):
        path, _, query = url.removeprefix("unix://").partition("?")
        database = parse_qs(query).get("db", ["0"])[0]
        return f"redis+socket://{path}?virtual_host={database}"
    return url


def publishing_app(redis_url: str) -> Celery:
    """A Celery application that only sends: 100 ms for the socket, no retry."""
    from celery import Celery  # a third of a second that processes without Redis need not spend

    app = Celery("bedplate-publisher", broker=broker_url(redis_url), set_as_current=False)
    app.conf.update(
        broker_transport_options={"socket_timeout": SOCKET_SECONDS, "socket_connect_timeout": SOCKET_SECONDS},
        broker_connection_retry=False,
        task_ignore_result=True,
    )
    return app


class Publisher(Protocol):
    def due(self, run_id: str, shard: int) -> None:
        """Say that the run may be due. Returns at once, never raises."""
        ...


class NoPublisher:
    """Says nothing: the sweep finds the run."""

    def due(self, run_id: str, shard: int) -> None:
        del run_id, shard


class RecordingPublisher:
    """Remembers what it was told; for tests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def due(self, run_id: str, shard: int) -> None:
        self.told.append((run_id, shard))


class CeleryPublisher:
    """Sends to Redis (an empty URL: there is none). `attach` gives it the way out for when Redis is away.

    Whoever made it closes it when the process ends.
    """

    def __init__(self, redis_url: str) -> None:
        self._app = publishing_app(redis_url) if redis_url else None
        self._queue: SimpleQueue[tuple[str, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notify: Notify | None = None
        self._silent_until = 0.0
        self._pending: set[asyncio.Task[object]] = set()

    def attach(self, notify: Notify) -> None:
        """Use `notify` (in the running event loop) for what Redis does not take."""
        self._loop = asyncio.get_running_loop()
        self._notify = notify

    def due(self, run_id: str, shard: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._send_forever, name="publisher", daemon=True)
            self._thread.start()
        self._queue.put((run_id, shard))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=2)
            self._thread = None
        if self._app is not None:
            self._app.close()

    def _send_forever(self) -> None:
        while (message := self._queue.get()) is not None:
            run_id, shard = message
            if self._app is None or time.monotonic() < self._silent_until:
                self._fall_back(run_id, shard)
                continue
            try:
                self._app.send_task(ADVANCE, (run_id,), queue=queue_of(shard), retry=False, ignore_result=True)
            except Exception as error:  # noqa: BLE001 - whatever the broker's client dies of, the message is only a hint
                log.warning("Redis does not take messages, NOTIFY does: %s", error)
                self._silent_until = time.monotonic() + _SULK_SECONDS
                self._fall_back(run_id, shard)

    def _fall_back(self, run_id: str, shard: int) -> None:
        loop, notify = self._loop, self._notify
        if loop is None or notify is None:
            return

        def send() -> None:
            task = asyncio.ensure_future(_quietly(notify(f"{shard} {run_id}")))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

        with contextlib.suppress(RuntimeError):  # the loop is closed: the sweep finds the run
            loop.call_soon_threadsafe(send)


async def _quietly(notice: Awaitable[object]) -> None:
    try:
        await notice
    except Exception as error:  # noqa: BLE001 - a hint that is lost costs latency only
        log.warning("NOTIFY failed too, the sweep finds the run: %s", error)
