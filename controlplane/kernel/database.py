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
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from controlplane.kernel import sql
from controlplane.kernel.publish import CeleryPublisher, NoPublisher, Publisher

DUE = "bedplate.due"  # session.info: the runs nudged in this transaction, as (run id, shard)
_PUBLISHER = "bedplate.publisher"
_LEASE_CONNECTIONS = 4


class KernelSession(Session):
    """The synchronous core of our AsyncSession; a class of its own so that the events below touch no one else."""


@event.listens_for(KernelSession, "after_commit")
def _publish(session: Session) -> None:
    """SQLAlchemy also calls this when a savepoint is released: then nothing is committed yet."""
    if session.in_nested_transaction():
        return
    publisher: Publisher = session.info.get(_PUBLISHER) or NoPublisher()
    for run_id, shard in session.info.pop(DUE, ()):
        publisher.due(run_id, shard)


@event.listens_for(KernelSession, "after_rollback")
def _forget(session: Session) -> None:
    """A savepoint that was rolled back may leave a nudge too many, which is harmless; one too few would not be."""
    if session.in_nested_transaction():
        return
    session.info.pop(DUE, None)


def _refuse_closed(adapted: DBAPIConnection, record: ConnectionPoolEntry, proxy: PoolProxiedConnection) -> None:
    """Have the pool connect anew where the server has gone meanwhile: known without a round trip."""
    del record, proxy
    if getattr(adapted, "driver_connection").is_closed():  # noqa: B009 - not in SQLAlchemy's protocol
        raise DisconnectionError


class _Connection(asyncpg.Connection):
    """Nothing here changes a connection's settings, so giving it back needs no round trip to reset them."""

    def get_reset_query(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """`pool` for SQL of one's own, `sessionmaker` for models, `leases` for claims and renewals only (their commits do not
    wait for the disk, see decision 0016). Close it in the event loop that opened it.
    """

    url: str
    pool: asyncpg.Pool
    leases: asyncpg.Pool
    engine: AsyncEngine
    sessionmaker: async_sessionmaker[AsyncSession]
    publisher: Publisher

    @classmethod
    async def open(
        cls, url: str, *, pool_size: int = 10, publisher: Publisher | None = None, statement_seconds: float = 0
    ) -> Self:
        """Connect. `url` is `postgresql://…` (also `?host=/socket/directory`); raises what asyncpg raises.

        `pool` and engine each grow up to `pool_size` connections on demand, `leases` up to 4. A CeleryPublisher given here
        falls back to NOTIFY on this database; whoever made it closes it. A statement that takes longer than
        `statement_seconds` is cancelled by the server (SQLSTATE 57014); 0 = never. Waiting for a lock counts.
        """
        publisher = publisher or NoPublisher()
        limits = {"statement_timeout": str(int(statement_seconds * 1000))}
        pool = await asyncpg.create_pool(
            url, min_size=1, max_size=pool_size, connection_class=_Connection, server_settings=limits
        )
        leases = await asyncpg.create_pool(
            url,
            min_size=0,
            max_size=_LEASE_CONNECTIONS,
            connection_class=_Connection,
            server_settings={"synchronous_commit": "off"},
        )
        engine = create_async_engine(
            url.replace("postgresql://", "postgresql+asyncpg://", 1),
            pool_size=pool_size,
            max_overflow=0,
            connect_args={"server_settings": limits},
        )
        event.listen(engine.sync_engine, "checkout", _refuse_closed)
        sessionmaker = async_sessionmaker(
            engine, expire_on_commit=False, sync_session_class=KernelSession, info={_PUBLISHER: publisher}
        )
        database = cls(url=url, pool=pool, leases=leases, engine=engine, sessionmaker=sessionmaker, publisher=publisher)
        if isinstance(publisher, CeleryPublisher):
            publisher.attach(database.notify)
        return database

    async def notify(self, payload: str) -> None:
        """NOTIFY the workers, `<shard> <run id>`: the way out when Redis is away."""
        await self.pool.execute(sql.NOTIFY_RUN_DUE, payload)

    async def close(self) -> None:
        await self.engine.dispose()
        await self.leases.close()
        await self.pool.close()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session in a transaction that commits at the end, or rolls back on an exception."""
        async with self.sessionmaker.begin() as session:
            yield session
