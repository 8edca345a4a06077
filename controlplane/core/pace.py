"""A limit of bytes a second that all transfers of one process share. The one rule: who has sent waits, not who will."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from controlplane.core.clock import Clock, SystemClock

_AHEAD_SECONDS = 0.25


class Pace:
    """0 bytes a second: no limit. What is unused now is not saved for later, but for a quarter of a second."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._free_at = float("-inf")

    async def spend(self, count: int) -> None:
        """Account for bytes that have just gone; returns when the next may."""
        if not self._rate:
            return
        now = self._clock.monotonic()
        self._free_at = max(self._free_at, now - _AHEAD_SECONDS) + count / self._rate
        if self._free_at > now:
            await self._sleep(self._free_at - now)
