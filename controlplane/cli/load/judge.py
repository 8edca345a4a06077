"""Whether a run is good enough: an objective for the search of the limit, a baseline for regressions."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Milliseconds at a percentile; None asks nothing. `error_share` of requests may fail."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    percent: int = 95
    error_share: float = 0.01

    def missed(self, summary: Summary) -> list[str]:
        """What the run missed, in words."""
        found: list[str] = []
        share = summary["errors"] / max(1, summary["requests"])
        if share > self.error_share or summary["requests"] == 0:
            found.append(f"{100 * share:.1f} % of requests failed, {100 * self.error_share:g} % may")
        for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
            most = getattr(self, name)
            seen = summary[name] and summary[name][f"p{self.percent}"]
            if most is not None and seen is not None and seen > most:
                found.append(f"{name} p{self.percent} {seen:.1f} over {most:g}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    rate: float
    summary: Summary
    missed: list[str]


async def find_limit(
    run: Callable[[float], Awaitable[Summary]], objective: Objective, *, first: float, most: float, precision: float = 0.05
) -> list[Tried]:
    """Runs at rates a second: doubling until the objective is missed, then halving the bracket to `precision`.

    Returns all tries in order.
    """
    tries: list[Tried] = []

    async def attempt(rate: float) -> bool:
        summary = await run(rate)
        tries.append(Tried(rate=rate, summary=summary, missed=objective.missed(summary)))
        return not tries[-1].missed

    low, rate = 0.0, first
    while await attempt(rate):
        low = rate
        if rate >= most:
            return tries
        rate = min(most, 2 * rate)
    high = rate
    while high - low > precision * high and high > first / 1024:
        middle = math.sqrt(low * high) if low else high / 2
        if await attempt(middle):
            low = middle
        else:
            high = middle
    return tries


def limit_of(tries: list[Tried]) -> Tried | None:
    """The highest rate that met the objective."""
    return max((one for one in tries if not one.missed), key=lambda one: one.rate, default=None)


HIGHER_IS_BETTER = ("requests_per_second", "output_tokens_per_second")
LOWER_IS_BETTER = (("ttft_ms", "p50"), ("ttft_ms", "p95"), ("tpot_ms", "p50"), ("tpot_ms", "p95"), ("e2e_ms", "p95"))


def regressions(before: Summary, after: Summary, *, tolerance: float) -> list[str]:
    """What became worse by more than `tolerance` (0.1 = a tenth), in words."""
    found: list[str] = []
    if after["errors"] > before["errors"]:
        found.append(f"errors {before['errors']} → {after['errors']}")
    found += [
        f"{name} {before[name]:.2f} → {after[name]:.2f}"
        for name in HIGHER_IS_BETTER
        if after[name] < before[name] * (1 - tolerance)
    ]
    for name, part in LOWER_IS_BETTER:
        was, now = (before[name] or {}).get(part), (after[name] or {}).get(part)
        if was is not None and now is not None and now > was * (1 + tolerance):
            found.append(f"{name} {part} {was:.1f} → {now:.1f}")
    return found
