"""What a run means: percentiles of TTFT, TPOT, ITL and end-to-end time, tokens and requests a second, errors by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from controlplane.cli.load.drive import Ran

QUANTILES = (50, 90, 95, 99)
TIMES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def percentile(values: list[float], percent: float) -> float:
    """By linear interpolation between the closest ranks; `values` sorted and not empty."""
    place = (len(values) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Milliseconds: mean and percentiles; None without values."""
    values = sorted(1000 * value for value in seconds if value is not None)
    if not values:
        return None
    found = {f"p{percent}": round(percentile(values, percent), 3) for percent in QUANTILES}
    return {"mean": round(sum(values) / len(values), 3), **found}


def summarise(ran: Ran) -> dict[str, Any]:
    good = [one for one in ran.calls if not one.error]
    seconds = ran.seconds or 1e-9
    return {
        "requests": len(ran.calls),
        "errors": len(ran.calls) - len(good),
        "errors_by_kind": dict(Counter(one.error for one in ran.calls if one.error).most_common(10)),
        "seconds": round(ran.seconds, 3),
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(sum(one.completion_tokens for one in good) / seconds, 3),
        "prompt_tokens": sum(one.prompt_tokens or 0 for one in good),
        "output_tokens": sum(one.completion_tokens for one in good),
        "ttft_ms": spread(one.ttft for one in good),
        "tpot_ms": spread(one.tpot for one in good),
        "itl_ms": spread(gap for one in good for gap in one.gaps),
        "e2e_ms": spread(one.ended - one.began for one in good),
    }
