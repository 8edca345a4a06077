"""The publisher of event positions: a reader that passed a position never misses what commits later."""

from __future__ import annotations

import asyncio
import contextlib

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from controlplane.events.feed import EventFeed
from controlplane.events.service import emit
from controlplane.resources.event import queries


async def emitted(database, count: int, first: int = 0):
    async with database.session() as session:
        for number in range(first, first + count):
            await emit(session, "test.event", "project", "proj_x", body={"number": number})


async def read(database, after: int = 0) -> list[tuple[int, int]]:
    async with database.sessionmaker() as session:
        return [(event.position, event.body["number"]) for event in await queries.after(session, after, queries.Wanted())]


async def test_a_lower_insert_that_commits_later_comes_later(database):
    feed = EventFeed(database)
    async with database.sessionmaker() as slow:
        await emit(slow, "test.event", "project", "proj_x", body={"number": 1})
        await emitted(database, 1, first=2)
        await feed.publish()
        seen = await read(database)
        assert [number for _, number in seen] == [2]
        await slow.commit()
    await feed.publish()
    assert [number for _, number in await read(database, after=seen[-1][0])] == [1]


async def test_many_publishers_number_every_event_once(database):
    feeds = [EventFeed(database) for _ in range(4)]
    for round_ in range(5):
        await emitted(database, 20, first=round_ * 20)
        await asyncio.gather(*(feed.publish() for feed in feeds))
    await feeds[0].publish()
    events = []
    while batch := await read(database, after=events[-1][0] if events else 0):
        events += batch
    assert [number for _, number in events] == list(range(100))
    positions = [position for position, _ in events]
    assert len(set(positions)) == 100
    assert positions == sorted(positions)


async def test_waiters_wake_and_a_lost_database_is_waited_out(database, cut):
    feed = EventFeed(database)
    running = asyncio.create_task(feed.run())
    waiting = asyncio.create_task(feed.wait(0, 20))
    await cut()
    with contextlib.suppress(DBAPIError):
        await emitted(database, 1)
    await emitted(database, 1)
    await asyncio.wait_for(waiting, 15)
    assert feed.head > 0
    closing = asyncio.create_task(feed.wait(feed.head, 20))
    await asyncio.sleep(0)
    await feed.close()
    await asyncio.wait_for(closing, 1)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_old_events_and_keys_are_removed(database):
    await emitted(database, 2)
    feed = EventFeed(database)
    await feed.publish()
    async with database.session() as session:
        await session.execute(text("UPDATE event SET created_at = now() - interval '31 days' WHERE body ->> 'number' = '0'"))
    await feed._clean()
    assert [number for _, number in await read(database)] == [1]
