"""What changed on this host, for whoever subscribes. The one rule: an event is emitted only when what is observed changed.

The log lives in memory: a new agent process has a new log id, an unknown log or a dropped seq is answered `events.reset`,
and the watcher observes everything. So nothing is lost by a restart, and nothing needs to be kept.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Any

from hostagent.protocol.frames import Event
from hostagent.protocol.verbs import Cursor

KEPT_EVENTS = 4096
RESET = "events.reset"


class EventLog:
    def __init__(self) -> None:
        self.log = uuid.uuid4().hex
        self.seq = 0
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._news = asyncio.Event()

    @property
    def cursor(self) -> Cursor:
        return Cursor(log=self.log, seq=self.seq)

    def emit(self, event: str, **body: Any) -> None:
        self.seq += 1
        self._events.append(Event(event=event, log=self.log, seq=self.seq, body=body))
        self._news.set()
        self._news = asyncio.Event()

    def since(self, cursor: Cursor) -> list[Event] | None:
        """Events after the cursor; None when they are no longer (or never were) here."""
        if cursor.log != self.log or cursor.seq > self.seq or cursor.seq < self.seq - len(self._events):
            return None
        return [event for event in self._events if event.seq > cursor.seq] if cursor.seq < self.seq else []

    def reset(self) -> Event:
        return Event(event=RESET, log=self.log, seq=self.seq, body={})

    async def wait(self, cursor: Cursor) -> list[Event]:
        """At least one event after the cursor; a single `events.reset` when the reader fell behind too far."""
        while True:
            news = self._news
            events = self.since(cursor)
            if events is None:
                return [self.reset()]
            if events:
                return events
            await news.wait()
