"""Leaving a replica alone while its engine fails, and trying it again with one request at a time.

The one rule: only faults of the engine count (no connection, reset, 5xx); what a client did wrong never opens a breaker, and an
open breaker only steers away: where nothing else is left, the replica is tried all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

OPENS_AFTER = 3
FIRST_OPEN_SECONDS = 2.0
LONGEST_OPEN_SECONDS = 60.0


@dataclass(slots=True)
class Breaker:
    """Of one replica. Closed: `open_until` is 0. Half open: the time is over and one trial may go."""

    faults: int = 0
    open_until: float = 0.0
    open_seconds: float = 0.0
    has_trial: bool = False

    def is_closed(self, now: float) -> bool:
        """Whether requests may go: closed, or half open without a trial on its way."""
        return not self.open_until or (now >= self.open_until and not self.has_trial)

    def enter(self, now: float) -> None:
        if self.open_until and now >= self.open_until:
            self.has_trial = True

    def succeeded(self) -> None:
        self.faults, self.open_until, self.open_seconds, self.has_trial = 0, 0.0, 0.0, False

    def failed(self, now: float) -> None:
        """A trial that fails opens it for twice as long; requests that were under way when it opened change nothing."""
        self.faults += 1
        if self.open_until and not (self.has_trial or now >= self.open_until):
            return
        if self.open_until or self.faults >= OPENS_AFTER:
            self.open_seconds = min(LONGEST_OPEN_SECONDS, 2 * self.open_seconds or FIRST_OPEN_SECONDS)
            self.open_until, self.has_trial = now + self.open_seconds, False

    def undecided(self) -> None:
        """A trial whose client left says nothing; another may go."""
        self.has_trial = False


class Breakers:
    """Breakers by replica; a replica without a fault has none."""

    def __init__(self) -> None:
        self._breakers: dict[str, Breaker] = {}

    def is_closed(self, replica_id: str, now: float) -> bool:
        breaker = self._breakers.get(replica_id)
        return breaker is None or breaker.is_closed(now)

    def enter(self, replica_id: str, now: float) -> None:
        if breaker := self._breakers.get(replica_id):
            breaker.enter(now)

    def succeeded(self, replica_id: str) -> None:
        self._breakers.pop(replica_id, None)

    def failed(self, replica_id: str, now: float) -> None:
        self._breakers.setdefault(replica_id, Breaker()).failed(now)

    def undecided(self, replica_id: str) -> None:
        if breaker := self._breakers.get(replica_id):
            breaker.undecided()

    def open_count(self, now: float) -> int:
        return sum(not breaker.is_closed(now) for breaker in self._breakers.values())

    def keep(self, replica_ids: frozenset[str]) -> None:
        """Forget replicas that are gone."""
        for replica_id in [one for one in self._breakers if one not in replica_ids]:
            del self._breakers[replica_id]
