"""The stream of events as server-sent events (WHATWG HTML, section 9.2).

The one rule: between two batches no connection to the database is held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from controlplane.core import json
from controlplane.events.feed import EventFeed, Sessions
from controlplane.models.event import Event
from controlplane.resources.event import queries
from controlplane.resources.event.schemas import EventView

KEEPALIVE_SECONDS = 15.0


class Standing(Protocol):
    """The right by which a stream is open."""

    @property
    def due_seconds(self) -> float: ...

    async def holds(self) -> bool: ...


def encode(event: Event) -> bytes:
    body = json.dumps(EventView.model_validate(event).model_dump())
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.position or 0, event.kind.encode(), body)


async def stream(
    database: Sessions, feed: EventFeed, after: int | None, wanted: queries.Wanted, standing: Standing
) -> AsyncIterator[bytes]:
    """Events behind `after` (None: from now on) while the right to them holds; every 15 s the position shows that it lives.

    An `id` without `data` is no event: it tells a client from where to go on. When events behind `after` were removed by age,
    the first message is `events.reset`: look at everything anew.
    """
    async with database.sessionmaker() as session:
        position = await queries.head(session) if after is None else after
        tail = await queries.tail(session)
    yield b"retry: 1000\nid: %d\n\n" % position
    if after and tail > after + 1:
        yield b'id: %d\nevent: events.reset\ndata: {"position":%d}\n\n' % (tail - 1, tail - 1)
        position = tail - 1
    while not feed.is_closed and await standing.holds():
        async with database.sessionmaker() as session:
            newest = feed.head
            events = await queries.after(session, position, wanted)
        for event in events:
            yield encode(event)
        if len(events) < queries.BATCH:
            position = max(position, newest, events[-1].position or 0 if events else 0)
            await feed.wait(position, min(KEEPALIVE_SECONDS, standing.due_seconds))
            if feed.head <= position:
                yield b"id: %d\n\n" % position
        else:
            position = events[-1].position or 0
