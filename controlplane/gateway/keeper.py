"""Keeps the directory fresh: by NOTIFY at once, and by reading a version number once a second in case one was lost.

The one rule: with the database away the last directory stays in force; only what it does not know cannot be decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

import asyncpg

from controlplane.gateway import queries
from controlplane.gateway.directory import Directory
from controlplane.gateway.entry import Unseal

log = logging.getLogger(__name__)

_PERIOD_SECONDS = 1.0
_LEAST_GAP_SECONDS = 0.05
_QUERY_SECONDS = 5
_RECHECK_SECONDS = 2.0
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


class Keeper:
    """`current` is always usable; `is_connected` says whether the last look at the database succeeded."""

    def __init__(
        self,
        database_url: str,
        *,
        instance: str = "",
        on_routes: Callable[[Directory], None] = lambda _: None,
        in_use: Callable[[], frozenset[str]] = frozenset,
        on_gateways: Callable[[int], None] = lambda _: None,
        unseal: Unseal | None = None,
    ) -> None:
        self.current = Directory()
        self.is_connected = False
        self._url = database_url
        self._instance = instance
        self._on_routes = on_routes
        self._in_use = in_use
        self._on_gateways = on_gateways
        self._unseal = unseal
        self._shown_at = 0.0
        self._shown_routes = 0
        self._reported: frozenset[str] | None = None
        self._versions: dict[str, int] | None = None
        self._wake = asyncio.Event()
        self._has_tried = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []

    async def run(self) -> None:
        """Until cancelled: connect, look, wait; connect again when the database went away."""
        while True:
            try:
                await self._serve()
            except _AWAY as error:
                if self.is_connected:
                    log.warning("the database is away; known keys keep working: %s", error)
            self.is_connected = False
            self._has_tried.set()
            self._release(self._take_waiters())
            await asyncio.sleep(_PERIOD_SECONDS)

    async def tried(self) -> None:
        """Return when the database was looked at once, with or without success."""
        await self._has_tried.wait()

    async def recheck(self) -> None:
        """Look now and return when the answer is in; returns at once when the database is away. Calls share one look."""
        if not self.is_connected:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECHECK_SECONDS):
                await waiter

    async def _serve(self) -> None:
        connection = await asyncpg.connect(self._url, timeout=_QUERY_SECONDS, command_timeout=_QUERY_SECONDS)
        self._reported = None
        try:
            await connection.add_listener(queries.CHANNEL, self._notified)
            while True:
                self._wake.clear()
                waiters = self._take_waiters()
                try:
                    await self._look(connection)
                finally:
                    self._release(waiters)
                await self._report(connection)
                self.is_connected = True
                self._has_tried.set()
                await asyncio.sleep(_LEAST_GAP_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_SECONDS):
                        await self._wake.wait()
        except asyncio.CancelledError:
            with suppress(*_AWAY):  # requests have ended before this is stopped
                await queries.report_use(connection, self._instance, [])
                await queries.leave(connection, self._instance)
            raise
        finally:
            connection.terminate()

    async def _look(self, connection: asyncpg.Connection) -> None:
        """Read what has changed. Versions are read first, so what is newer than them is only read twice, never missed."""
        found = await queries.versions(connection)
        if found == self._versions:
            return
        known = self._versions or {}
        keys, routes, offers = self.current.keys, self.current.routes, self.current.offers
        if self._versions is None or found.get("keys") != known.get("keys"):
            keys = await queries.keys(connection)
        if self._versions is None or found.get("routes") != known.get("routes"):
            routes, offers = await queries.routes(connection, self._unseal)
        self.current = Directory(keys=keys, routes=routes, offers=offers)
        self._versions = found
        self._on_routes(self.current)

    async def _report(self, connection: asyncpg.Connection) -> None:
        """Say at which replicas answers are open when that has changed, then that we are here and which routes we go by.

        In this order: who reads that we have left a replica out can also read whether an answer is still open there.
        """
        if (in_use := self._in_use()) != self._reported:
            await queries.report_use(connection, self._instance, sorted(in_use))
            self._reported = in_use
        routes = (self._versions or {}).get("routes", 0)
        if (now := time.monotonic()) - self._shown_at >= _PERIOD_SECONDS or routes != self._shown_routes:
            self._on_gateways(await queries.show_presence(connection, self._instance, routes))
            self._shown_at, self._shown_routes = now, routes

    def _notified(self, *_: object) -> None:
        self._wake.set()

    def _take_waiters(self) -> list[asyncio.Future[None]]:
        waiters, self._waiters = self._waiters, []
        return waiters

    @staticmethod
    def _release(waiters: list[asyncio.Future[None]]) -> None:
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
