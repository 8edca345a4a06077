"""The waiting room: requests for which no replica is ready, or all are full, in order, bounded in number, bytes and time.

The one rule: who waits longest goes first, and only as many go as there are free places, so that a replica that has just
started is not buried.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


class RoomIsFull(Exception):
    """No more may wait; nothing was kept."""


@dataclass(slots=True, kw_only=True)
class Waiter:
    """One request; it keeps its place when it finds nothing after being called."""

    number: int
    size_bytes: int
    called: asyncio.Event = field(default_factory=asyncio.Event)


class WaitingRoom:
    """Of one process; waiters by the endpoint they wait for."""

    def __init__(self, *, most_requests: int, most_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._waiters: dict[str, dict[int, Waiter]] = {}
        self._bytes = 0
        self._next = 0

    def count(self, endpoint_id: str) -> int:
        return len(self._waiters.get(endpoint_id, ()))

    def enter(self, endpoint_id: str, size_bytes: int) -> Waiter:
        """Raises RoomIsFull. `most_requests` holds for each endpoint, `most_bytes` for all."""
        here = self._waiters.setdefault(endpoint_id, {})
        if len(here) >= self._most_requests or self._bytes + size_bytes > self._most_bytes:
            raise RoomIsFull
        self._next += 1
        waiter = here[self._next] = Waiter(number=self._next, size_bytes=size_bytes)
        self._bytes += size_bytes
        return waiter

    def leave(self, endpoint_id: str, waiter: Waiter) -> None:
        here = self._waiters[endpoint_id]
        del here[waiter.number]
        if not here:
            del self._waiters[endpoint_id]
        self._bytes -= waiter.size_bytes

    def is_first(self, endpoint_id: str, waiter: Waiter) -> bool:
        return next(iter(self._waiters[endpoint_id])) == waiter.number

    def call(self, endpoint_id: str, count: int) -> None:
        """Up to `count` of those who wait longest look again."""
        here = self._waiters.get(endpoint_id)
        if here:
            for waiter in list(here.values())[:count]:
                waiter.called.set()

    def endpoints(self) -> list[str]:
        return list(self._waiters)
