"""Which replica takes a request: an endpoint by weight, then the less busy of two replicas drawn at random.

The one rule: what counts as busy is what is in flight from here, entered before the request leaves and left in `finally`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from controlplane.gateway.directory import ReplicaEntry, RouteEntry, Target


class Router:
    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        self._in_flight: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    def enter(self, replica_id: str) -> None:
        self._in_flight[replica_id] = self._in_flight.get(replica_id, 0) + 1

    def leave(self, replica_id: str) -> None:
        left = self._in_flight[replica_id] - 1
        if left:
            self._in_flight[replica_id] = left
        else:
            del self._in_flight[replica_id]

    def choices(self, route: RouteEntry) -> Iterator[tuple[Target, ReplicaEntry]]:
        """Replicas to try, the best first, each at most once; the caller stops at the first that connects."""
        tried: set[str] = set()
        while choice := self._choose(route, tried):
            tried.add(choice[1].id)
            yield choice

    def _choose(self, route: RouteEntry, tried: set[str]) -> tuple[Target, ReplicaEntry] | None:
        open_targets = [
            (target, left)
            for target in route.targets
            if target.weight and (left := [replica for replica in target.replicas if replica.id not in tried])
        ]
        if not open_targets:
            return None
        if len(open_targets) == 1:
            target, left = open_targets[0]
        else:
            target, left = self._random.choices(open_targets, [target.weight for target, _ in open_targets])[0]
        if len(left) == 1:
            return target, left[0]
        return target, min(self._random.sample(left, 2), key=lambda replica: self._in_flight.get(replica.id, 0))
