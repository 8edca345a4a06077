"""Planned failures for fake drivers. The one rule: a fake fails only where a test told it to.

A point is `driver.word` (`machine.apply`, `storage.remove`); each planned error is raised once, oldest first.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque


class Faults:
    def __init__(self) -> None:
        self._errors: defaultdict[str, deque[Exception]] = defaultdict(deque)
        self._gates: dict[str, asyncio.Event] = {}
        self.passed: list[tuple[str, str]] = []

    def fail(self, point: str, error: Exception, *, times: int = 1) -> None:
        self._errors[point].extend([error] * times)

    def hold(self, point: str) -> asyncio.Event:
        """Everything that reaches `point` waits until the returned event is set."""
        return self._gates.setdefault(point, asyncio.Event())

    def release(self, point: str) -> None:
        gate = self._gates.pop(point, None)
        if gate is not None:
            gate.set()

    async def reach(self, point: str, subject: str = "") -> None:
        self.passed.append((point, subject))
        gate = self._gates.get(point)
        if gate is not None:
            await gate.wait()
        if self._errors[point]:
            raise self._errors[point].popleft()
