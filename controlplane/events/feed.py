"""The feed of events: gives positions after commit and wakes who waits for the next one.

The one rule: one publisher at a time in the whole deployment (an advisory lock held to the end of its transaction), so a
position that a reader has passed is never given to an event later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

_log = logging.getLogger(__name__)
_LOCK = 0x626564_02
_LOOK_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_HOUSEKEEPING_SECONDS = 600.0

_IS_PENDING = text("SELECT EXISTS (SELECT FROM event WHERE position IS NULL)")
_HEAD = text("SELECT position FROM event_head")
_TRY_LOCK = text("SELECT pg_try_advisory_xact_lock(:key)").bindparams(key=_LOCK)
_PUBLISH = text(
    """
    WITH oldest AS (
        SELECT id, row_number() OVER (ORDER BY sequence) AS place
        FROM (SELECT id, sequence FROM event WHERE position IS NULL ORDER BY sequence LIMIT 1000) AS unpublished
    ), head AS (
        INSERT INTO event_head (id, position) SELECT 1, count(*) FROM oldest
        ON CONFLICT (id) DO UPDATE SET position = event_head.position + excluded.position
        RETURNING position - (SELECT count(*) FROM oldest) AS before
    )
    UPDATE event SET position = head.before + oldest.place FROM oldest, head WHERE event.id = oldest.id
    """
)
_CLEAN = (
    text("DELETE FROM event WHERE position IS NOT NULL AND created_at < now() - interval '30 days'"),
    text("DELETE FROM idempotency_key WHERE created_at < now() - interval '24 hours'"),
    text("DELETE FROM login WHERE expires_at < now()"),
    text("DELETE FROM attempt WHERE greatest(failed_at, locked_until, began_at) < now() - interval '2 hours'"),
)


class Sessions(Protocol):
    @property
    def sessionmaker(self) -> async_sessionmaker[AsyncSession]: ...


class EventFeed:
    """One per process; `run` until cancelled, `wait` from any number of tasks."""

    def __init__(self, database: Sessions) -> None:
        self._database = database
        self._poked = asyncio.Event()
        self._moved = asyncio.Condition()
        self.head = 0
        self.is_closed = False

    def poke(self) -> None:
        """Say that something was committed; the feed looks at once instead of in 0.2 s."""
        self._poked.set()

    async def wait(self, after: int, timeout_seconds: float) -> None:
        """Return when an event after the position `after` may be read, the time is up, or the feed closes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds), self._moved:
                await self._moved.wait_for(lambda: self.head > after or self.is_closed)

    async def close(self) -> None:
        """Let every waiting stream end."""
        self.is_closed = True
        async with self._moved:
            self._moved.notify_all()

    async def run(self) -> None:
        """Publish and follow until cancelled; an absent database is waited out."""
        loop = asyncio.get_running_loop()
        clean_at = loop.time()
        while True:
            pause = _LOOK_SECONDS
            try:
                await self.publish()
                if loop.time() >= clean_at:
                    clean_at = loop.time() + _HOUSEKEEPING_SECONDS
                    await self._clean()
            except (SQLAlchemyError, OSError) as error:
                _log.warning("cannot publish events: %s", error)
                pause = _RETRY_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            self._poked.clear()

    async def publish(self) -> None:
        """Give positions to what was committed since, if no other process is at it, and tell the waiting."""
        async with self._database.sessionmaker() as session:
            if await session.scalar(_IS_PENDING) and await session.scalar(_TRY_LOCK):
                await session.execute(_PUBLISH)
                await session.commit()
            head = await session.scalar(_HEAD) or 0
            await session.rollback()
        if head > self.head:
            self.head = head
            async with self._moved:
                self._moved.notify_all()

    async def _clean(self) -> None:
        async with self._database.sessionmaker.begin() as session:
            for statement in _CLEAN:
                await session.execute(statement)
