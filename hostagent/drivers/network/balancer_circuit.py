"""Circuit breakers: from counters of the table to open, half open, closed. Pure, the time is told.

The one rule: errors are counted over a sliding window; an open circuit is tried again with a few of its flows, and one error
among them opens it again. Counters that go back (the table was written anew) start the window anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hostagent.drivers.network.balancer_health import HALF_OPEN_SHARE
from hostagent.protocol.network import CircuitWanted

HANDSHAKE_SECONDS = 1.0
CLOSED, HALF_OPEN, OPEN = 1.0, HALF_OPEN_SHARE, 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Of one backend, ever. `flows`: new ones, `accepted`: SYN-ACKs, `refused`: resets to a SYN, `resets`: resets later on."""

    flows: int = 0
    accepted: int = 0
    refused: int = 0
    resets: int = 0


@dataclass(slots=True, kw_only=True)
class Circuit:
    """`state` is the share of flows that may pass."""

    state: float = CLOSED
    since: float = 0.0
    samples: deque[tuple[float, Counts]] = field(default_factory=deque)

    def look(self, wanted: CircuitWanted, counts: Counts, now: float) -> bool:
        """Take a sample; True when the state changed."""
        if self.samples and counts.flows < self.samples[-1][1].flows:
            self.samples.clear()
        self.samples.append((now, counts))
        window = wanted.window_ms / 1000
        while len(self.samples) > 2 and self.samples[1][0] <= now - window:
            self.samples.popleft()
        if self.state == OPEN:
            return self._turn(HALF_OPEN, now) if now - self.since >= wanted.open_ms / 1000 else False
        if self.state == HALF_OPEN:
            if self.errors(now):
                return self._turn(OPEN, now)
            first = self.samples[0][1]
            is_proven = counts.accepted > first.accepted and now - self.since >= min(window, 2.0)
            return self._turn(CLOSED, now) if is_proven or now - self.since >= 3 * window else False
        return self._turn(OPEN, now) if self.errors(now) >= wanted.errors else False

    def errors(self, now: float) -> int:
        """Within the window. A handshake has failed when its flow began HANDSHAKE_SECONDS ago and nobody answered."""
        first, last = self.samples[0][1], self.samples[-1][1]
        settled = next((c for at, c in reversed(self.samples) if at <= now - HANDSHAKE_SECONDS), first)
        answered = (last.accepted - first.accepted) + (last.refused - first.refused)
        unanswered = max(0, settled.flows - first.flows - answered)
        return unanswered + (last.refused - first.refused) + (last.resets - first.resets)

    def _turn(self, state: float, now: float) -> bool:
        self.state, self.since = state, now
        newest = self.samples[-1]
        self.samples.clear()
        self.samples.append(newest)
        return True
