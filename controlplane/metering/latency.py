"""Times to the first token, counted in buckets: what gateways tell of a roll-out, and what is read from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# Upper bounds of the buckets, in milliseconds; one more bucket is open.
EDGES_MS = (10, 20, 35, 50, 75, 100, 150, 200, 350, 500, 750, 1000, 1500, 2000, 3500, 5000, 7500, 10_000, 20_000, 60_000)


def bucket(seconds: float) -> int:
    """The place in a list of counts of what took so long."""
    return bisect_left(EDGES_MS, 1000 * seconds)


def none() -> list[int]:
    return [0] * (len(EDGES_MS) + 1)


def percentile_ms(counts: Sequence[int], share: float) -> float | None:
    """The upper edge of the bucket in which it lies, of the open one twice the last; None when nothing was counted."""
    passed, total = 0, sum(counts)
    for edge, count in zip((*EDGES_MS, 2 * EDGES_MS[-1]), counts, strict=False):
        passed += count
        if total and passed >= share * total:
            return float(edge)
    return None
