"""What this gateway sees of endpoints that are rolled out, by revision: requests, failures, times to the first token.

The one rule: only faults of the engine count as failures (no connection, reset, 5xx, time-out), never what a client did wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.gateway.directory import ReplicaEntry, Target
from controlplane.metering import latency


@dataclass(slots=True)
class Seen:
    """Of one revision, since its roll-out was heard of."""

    requests: int = 0
    failures: int = 0
    ttft_counts: list[int] = field(default_factory=latency.none)


class TrafficBook:
    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], Seen] = {}

    def answered(self, target: Target, replica: ReplicaEntry, first_token_seconds: float | None) -> None:
        if target.is_rolling:
            seen = self._of(target, replica)
            seen.requests += 1
            if first_token_seconds is not None:
                seen.ttft_counts[latency.bucket(first_token_seconds)] += 1

    def failed(self, target: Target, replica: ReplicaEntry) -> None:
        if target.is_rolling:
            seen = self._of(target, replica)
            seen.requests += 1
            seen.failures += 1

    def keep(self, targets: Iterable[Target]) -> None:
        """Forget endpoints that are not rolled out any more."""
        rolling = {target.endpoint_id for target in targets if target.is_rolling}
        self._seen = {key: seen for key, seen in self._seen.items() if key[0] in rolling}

    def rows(self) -> list[tuple[str, int, Seen]]:
        return [(endpoint_id, revision, seen) for (endpoint_id, revision), seen in self._seen.items()]

    def _of(self, target: Target, replica: ReplicaEntry) -> Seen:
        return self._seen.setdefault((target.endpoint_id, replica.serving.revision), Seen())
