"""The waiting room: requests for which no replica is ready, or all are full, in order, bounded in number, bytes and time.

The one rule: the higher band goes first, and in it who waits longest; only as many go as there are free places, so that a
replica that has just started is not buried. When the room is full a higher band takes the place of who came last in the lowest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

BANDS = {"low": 0, "normal": 1, "high": 2}


class RoomIsFull(Exception):
    """No more may wait; nothing was kept."""


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One request; it keeps its place when it finds nothing after being called. `is_shed`: its place was taken."""

    number: int
    band: int
    size_bytes: int
    is_shed: bool = False
    called: asyncio.Event = field(default_factory=asyncio.Event)


class Queue:
    """Of one endpoint, by band."""

    def __init__(self) -> None:
        self._bands: tuple[dict[int, Waiter], ...] = tuple({} for _ in BANDS)

    def __len__(self) -> int:
        return sum(len(band) for band in self._bands)

    def __iter__(self) -> Iterator[Waiter]:
        for band in reversed(self._bands):
            yield from band.values()

    def add(self, waiter: Waiter) -> None:
        self._bands[waiter.band][waiter.number] = waiter

    def remove(self, waiter: Waiter) -> bool:
        """Whether it was here."""
        return self._bands[waiter.band].pop(waiter.number, None) is not None

    def last_below(self, band: int) -> Waiter | None:
        """Who came last in the lowest band that is below."""
        for lower in self._bands[:band]:
            if lower:
                return lower[next(reversed(lower))]
        return None


class WaitingRoom:
    """Of one process; waiters by the endpoint they wait for."""

    def __init__(self, *, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._queues: dict[str, Queue] = {}
        self._bytes = 0
        self._next = 0

    def count(self, endpoint_id: str) -> int:
        return len(self._queues.get(endpoint_id, ()))

    def enter(self, endpoint_id: str, size_bytes: int, band: int = BANDS["normal"]) -> Waiter:
        """Raises RoomIsFull. `most_requests` holds for each endpoint, `most_bytes` for all."""
        here = self._queues.setdefault(endpoint_id, Queue())
        while len(here) >= self._most_requests or self._bytes + size_bytes > self._most_bytes:
            victim = here.last_below(band)
            if victim is None:
                self._tidy(endpoint_id)
                raise RoomIsFull
            victim.is_shed = True
            victim.called.set()
            self.leave(endpoint_id, victim)
            here = self._queues.setdefault(endpoint_id, here)
        self._next += 1
        waiter = Waiter(number=self._next, band=band, size_bytes=size_bytes)
        here.add(waiter)
        self._bytes += size_bytes
        return waiter

    def leave(self, endpoint_id: str, waiter: Waiter) -> None:
        """Once or twice: one that was shed has left already."""
        here = self._queues.get(endpoint_id)
        if here is not None and here.remove(waiter):
            self._bytes -= waiter.size_bytes
            self._tidy(endpoint_id)

    def _tidy(self, endpoint_id: str) -> None:
        if not self._queues[endpoint_id]:
            del self._queues[endpoint_id]

    def call(self, endpoint_id: str, count: int) -> None:
        """Up to `count` of those whose turn it is look again."""
        for _, waiter in zip(range(count), self._queues.get(endpoint_id, ()), strict=False):
            waiter.called.set()

    def endpoints(self) -> list[str]:
        return list(self._queues)
