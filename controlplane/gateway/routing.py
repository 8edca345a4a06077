"""Which replica takes a request: a rule, an endpoint by weight, then the less busy of two replicas drawn at random, or, with
affinity, the one that has seen this prompt's beginning or this session before.

The one rule: what counts as busy is what is in flight from here, entered before the request leaves and left in `finally`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b
from math import ceil

from controlplane.gateway.breaker import Breakers
from controlplane.gateway.directory import Directory, ReplicaEntry, RouteEntry, Target
from controlplane.gateway.load import LoadBook
from controlplane.gateway.retry import FaultKind, RetryBudget
from controlplane.gateway.traffic import TrafficBook
from controlplane.gateway.waiting import WaitingRoom

Choice = tuple[Target, ReplicaEntry]
_ALL = 1 << 30
_BOUND = 1.25  # consistent hashing with bounded loads: no replica takes more than this over the mean


class Router:
    def __init__(self, room: WaitingRoom, seed: int | None = None) -> None:
        self.room = room
        self.book = LoadBook()
        self.random = random.Random(seed)  # noqa: S311 - spreads load, guards nothing
        self.breakers = Breakers()
        self.traffic = TrafficBook()
        self._in_flight: dict[str, int] = {}
        self._budgets: dict[str, RetryBudget] = {}
        self._routes: dict[str, RouteEntry] = {}
        self._targets: dict[str, Target] = {}
        self._present: frozenset[str] = frozenset()

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    def busy(self, replica_id: str) -> int:
        return self._in_flight.get(replica_id, 0)

    def in_use(self) -> frozenset[str]:
        """Replicas at which an answer is open."""
        return frozenset(self._in_flight)

    def enter(self, target: Target, replica: ReplicaEntry, now: float) -> None:
        self._in_flight[replica.id] = self.busy(replica.id) + 1
        self.breakers.enter(replica.id, now)
        self.book.enter(target.endpoint_id, now)

    def leave(self, target: Target, replica: ReplicaEntry, now: float) -> None:
        left = self._in_flight[replica.id] - 1
        if left:
            self._in_flight[replica.id] = left
        else:
            del self._in_flight[replica.id]
        self.book.leave(target.endpoint_id, now)
        self.call(target.endpoint_id)

    def is_present(self, replica: ReplicaEntry) -> bool:
        """Whether it is in the directory now: a plan is as old as its request, and an address may be another's by then."""
        return replica.id in self._present

    def has_room(self, target: Target, replica: ReplicaEntry) -> bool:
        return not target.max_in_flight or self.busy(replica.id) < target.max_in_flight

    def call(self, endpoint_id: str) -> None:
        """As many of those who wait for this endpoint as its replicas have places."""
        target = self._targets.get(endpoint_id)
        if target is None or not self.room.count(endpoint_id):
            return
        places = target.max_in_flight or target.places or _ALL
        free = sum(max(0, places - self.busy(replica.id)) for replica in target.replicas)
        self.room.call(endpoint_id, free)

    def latest(self, route: RouteEntry) -> RouteEntry:
        """The route as it is now, for a request that has waited."""
        return self._routes.get(route.id, route)

    def budget(self, route: RouteEntry) -> RetryBudget:
        return self._budgets.setdefault(route.id, RetryBudget())

    def follow(self, directory: Directory) -> None:
        """Forget what is gone from the directory."""
        self._routes = {route.id: route for route in directory.every_route()}
        every = (target for route in self._routes.values() for target in route.every_target())
        self._targets = {target.endpoint_id: target for target in every}
        self._present = frozenset(replica.id for target in self._targets.values() for replica in target.replicas)
        self.breakers.keep(self._present)
        self.traffic.keep(self._targets.values())
        self.book.keep(frozenset(target.endpoint_id for target in self._targets.values() if target.is_autoscaled))
        self._budgets = {route_id: budget for route_id, budget in self._budgets.items() if route_id in self._routes}
        for endpoint_id in self.room.endpoints():
            self.call(endpoint_id)

    def plan(self, targets: Sequence[Target], affinity: bytes, now: float) -> Plan:
        return Plan(self, targets, affinity, now)


class Plan:
    """The replicas that one request may try, in order: the chosen endpoint's, its fallback's, the other endpoints'."""

    def __init__(self, router: Router, targets: Sequence[Target], affinity: bytes, now: float) -> None:
        self._router = router
        self._affinity = affinity
        self._now = now
        self._waiting = [target for target in targets if target.weight]
        self._present: list[Target] = []
        self._tried: set[str] = set()

    def next(self, fault: FaultKind | None = None) -> Choice | None:
        """The next one, after `fault` at the one before; None = nothing is left. Open breakers come last."""
        if fault is FaultKind.FAILED:
            del self._present[:1]
            return self._from_present(is_any=False) or self._from_present(is_any=True)
        return self._from_all(is_any=False) or self._from_all(is_any=True)

    def again(self) -> None:
        """Every replica may be tried once more."""
        self._tried.clear()

    def _from_present(self, *, is_any: bool) -> Choice | None:
        for target in self._present:
            if choice := self._replica(target, is_any=is_any):
                return choice
        return None

    def _from_all(self, *, is_any: bool) -> Choice | None:
        if choice := self._from_present(is_any=is_any):
            return choice
        while self._waiting:
            usable = [target for target in self._waiting if self._is_usable(target, is_any=is_any)]
            if not usable:
                return None
            chosen = usable[0]
            if len(usable) > 1:
                chosen = self._router.random.choices(usable, [target.weight for target in usable])[0]
            self._waiting.remove(chosen)
            self._present = [*self._present, chosen, *([chosen.fallback] if chosen.fallback else [])]
            if choice := self._from_present(is_any=is_any):
                return choice
        return None

    def _is_usable(self, target: Target, *, is_any: bool) -> bool:
        """Whether it, or its fallback in its place, has a replica to try."""
        return bool(self._open(target, is_any=is_any) or (target.fallback and self._open(target.fallback, is_any=is_any)))

    def _open(self, target: Target, *, is_any: bool) -> list[ReplicaEntry]:
        breakers = self._router.breakers
        router = self._router
        untried = [one for one in target.replicas if one.id not in self._tried and router.is_present(one)]
        left = [one for one in untried if router.has_room(target, one)]
        return left if is_any else [replica for replica in left if breakers.is_closed(replica.id, self._now)]

    def _replica(self, target: Target, *, is_any: bool) -> Choice | None:
        left = self._shared(target, self._open(target, is_any=is_any))
        if not left:
            return None
        chosen = left[0] if len(left) == 1 else self._affine(left) if self._affinity else self._less_busy(left)
        self._tried.add(chosen.id)
        return target, chosen

    def _shared(self, target: Target, left: list[ReplicaEntry]) -> list[ReplicaEntry]:
        """While a revision is rolled out: its replicas or the others, by its share; one session always the same way."""
        if target.share is None:
            return left
        new = [replica for replica in left if replica.serving.revision == target.serving.revision]
        if not new or len(new) == len(left):
            return left
        drawn = 100 * self._router.random.random()
        if self._affinity:
            drawn = int.from_bytes(blake2b(self._affinity, digest_size=4).digest()) * 100 / (1 << 32)
        return new if drawn < target.share else [replica for replica in left if replica not in new]

    def _less_busy(self, left: list[ReplicaEntry]) -> ReplicaEntry:
        return min(self._router.random.sample(left, 2), key=lambda replica: self._router.busy(replica.id))

    def _affine(self, left: list[ReplicaEntry]) -> ReplicaEntry:
        """Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni and others, 2016)."""
        busy = self._router.busy
        most = ceil(_BOUND * (1 + sum(busy(replica.id) for replica in left)) / len(left))
        ranked = sorted(left, key=lambda replica: blake2b(self._affinity + replica.id.encode(), digest_size=8).digest())
        return next((replica for replica in ranked if busy(replica.id) < most), ranked[0])
