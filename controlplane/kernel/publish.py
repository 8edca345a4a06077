"""After a commit: `run X may be due`, said to the workers. The one rule: losing it costs latency, never work.

A thread of its own sends, because the broker's client blocks (100 ms at most, no retry); NOTIFY goes out only when that
failed.
"""

from __future__ import annotations

from typing import Protocol


class Publisher(Protocol):
    def due(self, run_id: str, shard: int) -> None:
        """Say that the run may be due. Returns at once, never raises."""
        ...


class NoPublisher:
    """Says nothing: the sweep finds the run."""

    def due(self, run_id: str, shard: int) -> None:
        del run_id, shard


class RecordingPublisher:
    """Remembers what it was told; for tests."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def due(self, run_id: str, shard: int) -> None:
        self.told.append((run_id, shard))
