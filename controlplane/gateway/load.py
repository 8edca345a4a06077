"""What each endpoint has to do, seen from this gateway: in flight and queued, weighted by time; and telling it every second.

The one rule: a stream counts for its whole life, so counts are integrated over time and never sampled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from datetime import UTC, datetime

import asyncpg

from controlplane.gateway import queries
from controlplane.gateway.queries import Load
from controlplane.gateway.traffic import TrafficBook

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


class Area:
    """A count and its integral over time."""

    __slots__ = ("_area", "_since", "count")

    def __init__(self, now: float) -> None:
        self.count = 0
        self._area = 0.0
        self._since = now

    def add(self, change: int, now: float) -> None:
        self._area += self.count * (now - self._since)
        self.count += change
        self._since = now

    def take(self, now: float, seconds: float) -> float:
        """The mean since the last take, `seconds` ago."""
        self.add(0, now)
        mean = self._area / seconds if seconds > 0 else float(self.count)
        self._area = 0.0
        return mean


class EndpointActivity:
    """One endpoint's."""

    __slots__ = ("arrived", "in_flight", "last_end_at", "queued")

    def __init__(self, now: float) -> None:
        self.in_flight, self.queued = Area(now), Area(now)
        self.arrived = 0
        self.last_end_at: datetime | None = None


class LoadBook:
    """`urgent` is set when an endpoint without a replica is asked for: the next report goes out at once."""

    def __init__(self) -> None:
        self.urgent = asyncio.Event()
        self._endpoints: dict[str, EndpointActivity] = {}
        self._taken_at = time.monotonic()

    def of(self, endpoint_id: str) -> EndpointActivity:
        return self._endpoints.setdefault(endpoint_id, EndpointActivity(time.monotonic()))

    def queued(self) -> int:
        return sum(activity.queued.count for activity in self._endpoints.values())

    def arrive(self, endpoint_id: str) -> None:
        """A request came for it; it may wait before it enters."""
        self.of(endpoint_id).arrived += 1

    def enter(self, endpoint_id: str, now: float) -> None:
        self.of(endpoint_id).in_flight.add(1, now)

    def leave(self, endpoint_id: str, now: float) -> None:
        activity = self.of(endpoint_id)
        activity.in_flight.add(-1, now)
        activity.last_end_at = datetime.now(UTC)

    def keep(self, endpoint_ids: frozenset[str]) -> None:
        """Report on these; forget others that have nothing to do."""
        for endpoint_id in endpoint_ids:
            self.of(endpoint_id)
        for endpoint_id in [one for one in self._endpoints if one not in endpoint_ids]:
            activity = self._endpoints[endpoint_id]
            if not (activity.in_flight.count or activity.queued.count):
                del self._endpoints[endpoint_id]

    def take(self, now: float) -> list[Load]:
        """Means since the last take."""
        seconds, self._taken_at = now - self._taken_at, now
        rows: list[Load] = []
        for endpoint_id, activity in self._endpoints.items():
            rows.append(
                Load(
                    endpoint_id=endpoint_id,
                    in_flight=activity.in_flight.take(now, seconds),
                    queued=activity.queued.take(now, seconds),
                    requests_per_second=activity.arrived / seconds if seconds > 0 else 0.0,
                    last_end_at=activity.last_end_at,
                )
            )
            activity.arrived = 0
        return rows


async def report_for_ever(book: LoadBook, traffic: TrafficBook, database_url: str, instance: str) -> None:
    """One row an endpoint every second, at once when something urgent waits; silence tells the autoscaler that we are away."""
    while True:
        try:
            connection = await asyncpg.connect(database_url, timeout=5, command_timeout=5)
            try:
                while True:
                    book.urgent.clear()
                    if rows := book.take(time.monotonic()):
                        await queries.tell_load(connection, instance, rows)
                    await queries.tell_traffic(connection, instance, traffic.rows())
                    with suppress(TimeoutError):
                        async with asyncio.timeout(PERIOD_SECONDS):
                            await book.urgent.wait()
                    await asyncio.sleep(0.05)
            finally:
                connection.terminate()
        except _AWAY as error:
            log.warning("the load cannot be told: %s", error)
        await asyncio.sleep(PERIOD_SECONDS)


async def take_back(database_url: str, instance: str) -> None:
    """End in good order: the silence that follows means nothing."""
    with suppress(*_AWAY):
        connection = await asyncpg.connect(database_url, timeout=2, command_timeout=5)
        try:
            await queries.forget_load(connection, instance)
        finally:
            connection.terminate()
