"""Time by injection. The one rule: code that waits or compares times takes a `Clock`; tests hand it a `ManualClock`."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    def now(self) -> datetime:
        """Wall clock, with time zone UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told; for tests."""

    def __init__(self, start: datetime | None = None) -> None:
        self._start = start or datetime(2026, 1, 1, tzinfo=UTC)
        self._elapsed = timedelta()

    def now(self) -> datetime:
        return self._start + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed.total_seconds()

    def advance(self, seconds: float) -> None:
        self._elapsed += timedelta(seconds=seconds)
