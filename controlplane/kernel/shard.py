"""Which of the 64 shards this process serves: leased in PostgreSQL, shared fairly, taken over within 15 s.

The one rule: a shard says who looks, not who may: claims alone keep two workers off one run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import asyncpg

from controlplane.kernel import sql
from controlplane.kernel.database import Database

log = logging.getLogger(__name__)
TICK_SECONDS = 2.5


class ShardKeeper:
    """Holds this worker's share. `on_change` is called with what was gained and what was lost."""

    def __init__(self, database: Database, worker: str, on_change: Callable[[set[int], set[int]], None] | None = None) -> None:
        self.database = database
        self.worker = worker
        self.held: set[int] = set()
        self._on_change = on_change

    async def run(self) -> None:
        """For ever; a database that is away means: we hold what we held, others take over when the leases end."""
        while True:
            try:
                await self.tick()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning("shard leases were not renewed: %s", error)
            await asyncio.sleep(TICK_SECONDS)

    async def tick(self) -> set[int]:
        """Renew, give back what is over our share, take what is free up to it; returns what we hold."""
        async with self.database.pool.acquire() as connection:
            await connection.execute(sql.BE_PRESENT, self.worker)
            rows = await connection.fetch(sql.LEASE_SHARDS, self.worker)
            if not rows and not await connection.fetchval(sql.HAS_SHARDS):
                await connection.execute(sql.MAKE_SHARDS)
                rows = await connection.fetch(sql.LEASE_SHARDS, self.worker)
        now = {row[0] for row in rows}
        gained, lost, self.held = now - self.held, self.held - now, now
        if self._on_change is not None and (gained or lost):
            self._on_change(gained, lost)
        return now

    async def leave(self) -> None:
        """Give all back, so that others take over at once."""
        await self.database.pool.execute(sql.LEAVE, self.worker)
        self.held = set()
