"""The database handle: one URL, a raw asyncpg pool for the kernel, an SQLAlchemy engine for models.

The one rule: a session made here publishes the runs it nudged after its commit, never before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import asyncpg
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from controlplane.kernel import sql
from controlplane.kernel.publish import CeleryPublisher, NoPublisher, Publisher

DUE = "bedplate.due"  # session.info: the runs nudged in this transaction, as (run id, shard)
_PUBLISHER = "bedplate.publisher"


class KernelSession(Session):
    """The synchronous core of our AsyncSession; a class of its own so that the events below touch no one else."""


@event.listens_for(KernelSession, "after_commit")
def _publish(session: Session) -> None:
    publisher: Publisher = session.info.get(_PUBLISHER) or NoPublisher()
    for run_id, shard in session.info.pop(DUE, ()):
        publisher.due(run_id, shard)


@event.listens_for(KernelSession, "after_rollback")
def _forget(session: Session) -> None:
    session.info.pop(DUE, None)


class _Connection(asyncpg.Connection):
    """Nothing here changes a connection's settings, so giving it back needs no round trip to reset them."""

    def get_reset_query(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """`pool` for SQL of one's own, `sessionmaker` for models. Close it in the event loop that opened it."""

    url: str
    pool: asyncpg.Pool
    engine: AsyncEngine
    sessionmaker: async_sessionmaker[AsyncSession]
    publisher: Publisher

    @classmethod
    async def open(cls, url: str, *, pool_size: int = 10, publisher: Publisher | None = None) -> Self:
        """Connect. `url` is `postgresql://…` (also `?host=/socket/directory`); raises what asyncpg raises.

        Each of the two pools grows up to `pool_size` connections, on demand. A CeleryPublisher given here falls back to
        NOTIFY on this database; whoever made it closes it.
        """
        publisher = publisher or NoPublisher()
        pool = await asyncpg.create_pool(url, min_size=1, max_size=pool_size, connection_class=_Connection)
        engine = create_async_engine(
            url.replace("postgresql://", "postgresql+asyncpg://", 1), pool_size=pool_size, max_overflow=0, pool_pre_ping=False
        )
        sessionmaker = async_sessionmaker(
            engine, expire_on_commit=False, sync_session_class=KernelSession, info={_PUBLISHER: publisher}
        )
        database = cls(url=url, pool=pool, engine=engine, sessionmaker=sessionmaker, publisher=publisher)
        if isinstance(publisher, CeleryPublisher):
            publisher.attach(database.notify)
        return database

    async def notify(self, payload: str) -> None:
        """NOTIFY the workers, `<shard> <run id>`: the way out when Redis is away."""
        await self.pool.execute(sql.NOTIFY_RUN_DUE, payload)

    async def close(self) -> None:
        await self.engine.dispose()
        await self.pool.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session in a transaction that commits at the end, or rolls back on an exception."""
        async with self.sessionmaker.begin() as session:
            yield session
