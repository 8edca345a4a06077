"""Renews, for one host, the lease of the addresses that it alone holds, and grants the host as much.

The one rule: the lease in the database is longer than the grant, and is written first; so once it is over the host knows that
it holds nothing for certain any more. A host that is silent gets no longer lease: it is only asked whether it answers.
"""

from __future__ import annotations

import asyncio
import time

from controlplane.kernel.database import Database
from controlplane.remote.link import AgentError, HostLinks, HostUnreachable
from controlplane.watch import queries
from hostagent.protocol.verbs import Grant

EVERY_SECONDS = 2.0
ANSWER_SECONDS = 3.0
GRANTED_SECONDS = 6.0
LEASED_SECONDS = 7.0
SILENT_SECONDS = 6.0
RETRY_SECONDS = 0.2


class Holding:
    """`every_seconds`: between renewals."""

    def __init__(self, host_id: str, links: HostLinks, database: Database, *, every_seconds: float = EVERY_SECONDS) -> None:
        self._host_id = host_id
        self._links = links
        self._database = database
        self._every_seconds = every_seconds
        self._stamp = ""
        self._is_silent = False

    async def keep(self) -> None:
        """Until the host has been silent for SILENT_SECONDS: raises HostUnreachable. Returns when its agent knows no grants."""
        answered = time.monotonic()
        while True:
            ids = await self._database.pool.fetchval(queries.HOLDS_ALONE, self._host_id)
            try:
                if ids:
                    await self._renew()
                answered, self._is_silent = time.monotonic(), False
            except AgentError as error:
                self._stamp = ""
                if not error.retryable:
                    return
            except (HostUnreachable, TimeoutError):
                self._is_silent = True
                if time.monotonic() - answered >= SILENT_SECONDS:
                    words = f"no answer for {time.monotonic() - answered:.0f} s"
                    raise HostUnreachable(self._host_id, words) from None
                await asyncio.sleep(RETRY_SECONDS)  # an unreachable host may be answered for at once, from memory
                continue
            await asyncio.sleep(self._every_seconds)

    async def _renew(self) -> None:
        if self._is_silent or not self._stamp:
            self._stamp = await self._grant(())
        ids = await self._lease()
        self._stamp = await self._grant(ids)

    async def _lease(self) -> tuple[str, ...]:
        """The lock of the lease's row comes first: what was taken from the host meanwhile is not granted to it."""
        async with self._database.pool.acquire() as connection, connection.transaction():
            await connection.execute(queries.RENEW_HOLDER, self._host_id, LEASED_SECONDS)
            rows = await connection.fetch(queries.HELD_ALONE, self._host_id)
        return tuple(row["object_id"] for row in rows)

    async def _grant(self, ids: tuple[str, ...]) -> str:
        body = Grant(ids=ids, stamp=self._stamp if ids else "", seconds=GRANTED_SECONDS)
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await self._links.call(self._host_id, "vm.grant", body, deadline_seconds=ANSWER_SECONDS)
        return str(answer.stamp)
