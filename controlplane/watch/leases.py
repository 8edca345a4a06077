"""Which hosts this watch holds: shards of hosts leased in PostgreSQL, shared fairly, taken over within 15 s.

The one rule: two watches on one host do no harm (signals may be sent twice); none for long does, so leases are short.
"""

from __future__ import annotations

from controlplane.kernel.database import Database
from controlplane.kernel.service import shard_of
from controlplane.models.run import SHARDS
from controlplane.watch import queries


class Leases:
    def __init__(self, database: Database, watch: str, socket: str = "") -> None:
        self._database = database
        self._watch = watch
        self._socket = socket
        self.held: frozenset[int] = frozenset()

    async def tick(self) -> frozenset[str]:
        """Renew, give back what is over our share, take what is free; the hosts we now hold."""
        async with self._database.pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.BE_PRESENT, self._watch, self._socket)
            await connection.execute(queries.FORGET_ABSENT)
            await connection.execute(queries.MAKE_SHARDS, SHARDS)
            share = await connection.fetchval(queries.SHARE, SHARDS)
            rows = await connection.fetch(queries.LEASE, self._watch, share)
            self.held = frozenset(row["id"] for row in rows)
            await connection.execute(queries.GIVE_BACK, self._watch, sorted(self.held))
            hosts = [row["id"] for row in await connection.fetch(queries.HOSTS)]
        return frozenset(host for host in hosts if shard_of(host) in self.held)

    async def leave(self) -> None:
        """Give all back, so that others take over at once."""
        async with self._database.pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.GIVE_BACK, self._watch, [])
            await connection.execute(queries.LEAVE, self._watch)
        self.held = frozenset()
