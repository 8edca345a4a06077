"""What backends carried, by the counters of edge hosts: pure. The one rule: a counter that fell began anew and says no rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from controlplane.core.json import Json
from hostagent.protocol.verbs import BackendTraffic

COUNTED = ("bytes_in", "bytes_out", "packets_in", "packets_out", "flows", "refused", "resets")
RATED = ("bytes_in", "bytes_out", "flows")
LEAST_SECONDS = 1.0


def measured(said: Iterable[BackendTraffic], before: object, now: datetime) -> dict[str, Json]:
    """By interface, as it is kept in the row: counters, and rates since the look before where there was one."""
    known: Mapping[str, Any] = before if isinstance(before, dict) else {}
    return {one.id: _one(one, known.get(one.id), now) for one in said}


def _one(one: BackendTraffic, before: Any, now: datetime) -> dict[str, Json]:
    found: dict[str, Json] = {name: getattr(one, name) for name in COUNTED}
    found |= {"live_flows": one.live_flows, "at": now.isoformat()}
    last: Mapping[str, Any] = before if isinstance(before, dict) else {}
    seconds = (now - datetime.fromisoformat(last["at"])).total_seconds() if last else 0.0
    if last and seconds < LEAST_SECONDS:
        return {**last}
    if last and all(getattr(one, name) >= last[name] for name in COUNTED):
        found |= {f"{name}_per_second": round((getattr(one, name) - last[name]) / seconds, 3) for name in RATED}
    return found


def summed(seen: Iterable[object]) -> dict[str, Any] | None:
    """Of one machine at all edges together, as the API shows it; None when no edge has counted yet."""
    found = [one for one in seen if isinstance(one, dict)]
    if not found:
        return None
    live = [one["live_flows"] for one in found]
    rates = {f"{name}_per_second": sum(one.get(f"{name}_per_second", 0.0) for one in found) for name in RATED}
    return {
        **{name: sum(one[name] for one in found) for name in COUNTED},
        **rates,
        "live_flows": None if None in live else sum(live),
        "at": max(one["at"] for one in found),
    }
