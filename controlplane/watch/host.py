"""Holds one host's event channel for as long as the host is ours.

The one rule: whatever breaks is told once, waited for with growing patience, and followed by looking at everything that may
have been missed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time

import asyncpg
from prometheus_client import Gauge
from sqlalchemy.exc import DBAPIError

from controlplane.remote.link import AgentError, Events, HostKeyChanged, HostLinks, HostUnreachable
from controlplane.watch.deliver import Delivery
from hostagent.protocol.verbs import Cursor

logger = logging.getLogger(__name__)
HOST_UP = Gauge("bedplate_host_up", "1 while the host's agent answers its watch.", ["host"])
LOST_AFTER_SECONDS = 10.0
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 15.0
RESET = "events.reset"
AWAY = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, DBAPIError)
"""How a database that is away shows itself: to the pool, and to a session."""


class HostWatcher:
    def __init__(
        self, host_id: str, links: HostLinks, delivery: Delivery, *, lost_after_seconds: float = LOST_AFTER_SECONDS
    ) -> None:
        self._host_id = host_id
        self._holding = delivery.holding(host_id, links)
        self._links = links
        self._delivery = delivery
        self._lost_after_seconds = lost_after_seconds
        self._failures = 0
        self._silent_since: float | None = None

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                try:
                    await self._hold()
                except (HostUnreachable, HostKeyChanged, AgentError) as error:
                    await self._broke(error)
                except AWAY as error:
                    logger.warning("%s: the database is away: %s", self._host_id, error)
                await asyncio.sleep(self._delay())
        finally:
            HOST_UP.remove(self._host_id)

    async def _hold(self) -> None:
        cursor = await self._delivery.cursor(self._host_id)
        if not cursor.log:
            cursor = await self._look()
        events = await self._links.subscribe(self._host_id, cursor)
        holding = asyncio.create_task(self._hold_addresses(events), name=f"holding {self._host_id}")
        try:
            await self._answers()
            async for event in events:
                if event.event == RESET:
                    await self._look()
                else:
                    await self._delivery.event(self._host_id, event)
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await events.close()

    async def _hold_addresses(self, events: Events) -> None:
        """A host that holds addresses alone and falls silent is lost sooner, so that they go to another."""
        try:
            await self._holding.keep()
        except HostUnreachable as error:
            await self._delivery.link(self._host_id, "lost", str(error))
            await self._links.forget(self._host_id)
            await events.close()
        except AWAY as error:
            logger.warning("%s: the database is away, addresses are not granted: %s", self._host_id, error)
            await events.close()

    async def _look(self) -> Cursor:
        """Observe everything; what is heard from its cursor on is newer than what was seen."""
        observed = await self._links.observe_host(self._host_id)
        await self._delivery.everything(self._host_id, observed)
        return observed.cursor

    async def _answers(self) -> None:
        HOST_UP.labels(self._host_id).set(1)
        self._failures, self._silent_since = 0, None
        await self._delivery.link(self._host_id, "up")
        await self._delivery.key_changed(self._host_id, None)

    async def _broke(self, error: HostUnreachable | HostKeyChanged | AgentError) -> None:
        now = time.monotonic()
        self._failures += 1
        self._silent_since = self._silent_since if self._silent_since is not None else now
        HOST_UP.labels(self._host_id).set(0)
        logger.info("%s: %s", self._host_id, error)
        try:
            if isinstance(error, HostKeyChanged):
                await self._delivery.key_changed(self._host_id, str(error))
            if now - self._silent_since >= self._lost_after_seconds:
                await self._delivery.link(self._host_id, "lost", str(error))
        except AWAY as failure:
            logger.warning("%s: the database is away: %s", self._host_id, failure)

    def _delay(self) -> float:
        longest = min(FIRST_DELAY_SECONDS * 2 ** min(self._failures, 10), LONGEST_DELAY_SECONDS)
        return longest * random.uniform(0.5, 1)  # noqa: S311 - spreads load, guards nothing
