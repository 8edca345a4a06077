"""One load balancer of this host: its document, what is known of its backends, and what was last written of it. Pure.

The one rule: a service is asked, never told what to do: `think` answers the tables for now, and `next_look` when to ask again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hostagent.drivers.network.balancer_buckets import Table, fill, share_out
from hostagent.drivers.network.balancer_health import Opinion, ServiceHealth
from hostagent.drivers.network.balancer_rules import FAMILIES, NO_GUARD, Family, Guard, address_of, family_of
from hostagent.probes.prober import Target
from hostagent.protocol.network import BackendWanted, LoadBalancerWanted, ProbeWanted

BUCKET_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0)
Opinions = dict[Family, dict[str, Opinion]]


@dataclass(slots=True, kw_only=True)
class Service:
    """`tables` and `opinions` are as last written; `targets` leads from a probe's target to (backend, family).

    `is_new`: the table has it not, or otherwise. `drained`: backends whose flows were ended at their drain's deadline.
    """

    wanted: LoadBalancerWanted
    health: ServiceHealth
    marks: dict[tuple[int, str], int]
    guard: Guard = NO_GUARD
    homes: dict[Family, Table] = field(default_factory=dict)
    tables: dict[Family, Table] = field(default_factory=dict)
    opinions: Opinions = field(default_factory=dict)
    targets: dict[Target, tuple[str, Family]] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    is_new: bool = True

    @property
    def families(self) -> tuple[Family, ...]:
        """Those of its addresses; backends' addresses of others are of no use."""
        return tuple(sorted({family_of(vip) for vip in self.wanted.vips}))

    def think(self, now: float, wall: float) -> tuple[Opinions, dict[Family, Table]]:
        opinions = self.health.judge(now, wall)
        return opinions, {family: self._table(family, opinions[family]) for family in self.families}

    def _table(self, family: Family, opinions: dict[str, Opinion]) -> Table:
        weights = {backend.id: backend.weight for backend in self.wanted.backends}
        if family not in self.homes:
            self.homes[family] = fill(weights)
        shares = {name: opinions[name].share if name in opinions else 0.0 for name in weights}
        return share_out(self.homes[family], weights, shares)

    def undrained(self, wall: float) -> Iterator[tuple[str, float]]:
        """(backend, seconds until its drain's deadline) of those whose flows are still left alone."""
        for backend in self.wanted.backends:
            if backend.state == "draining" and backend.id not in self.drained:
                yield backend.id, self.health.facts[backend.id].away_since + self.wanted.drain_seconds - wall

    def next_look(self, now: float, wall: float) -> float | None:
        """In so many seconds time alone changes something."""
        times = [self.health.next_change(now, wall), *(seconds for _, seconds in self.undrained(wall))]
        return min((max(seconds, 0.001) for seconds in times if seconds is not None), default=None)

    def changes(self, before: Opinions) -> Iterator[tuple[str, str]]:
        """(backend, its new word) where the word changed, once for each address family."""
        for family in FAMILIES:
            for name, opinion in self.opinions.get(family, {}).items():
                last = before.get(family, {}).get(name)
                if last is None or last.word != opinion.word:
                    yield name, opinion.word

    def words(self) -> dict[str, str]:
        """What a person reads of each backend; where the address families differ, both."""
        found: dict[str, str] = {}
        for backend in self.wanted.backends:
            known = {family: self.opinions.get(family, {}) for family in self.families}
            both = {family: found[backend.id].word for family, found in known.items() if backend.id in found}
            if both:
                same = len(set(both.values())) == 1
                found[backend.id] = next(iter(both.values())) if same else ", ".join(f"IPv{f}: {w}" for f, w in both.items())
        return found


def target_of(wanted: LoadBalancerWanted, backend: BackendWanted, family: Family, probe: ProbeWanted) -> Target | None:
    """Where a backend is probed; None when it has no address there, or no port is known that speaks TCP."""
    address = address_of(backend, family)
    port = probe.port or next((one.target_port for one in wanted.listeners if one.protocol == "tcp"), 0)
    return Target(address=address, port=port, probe=probe) if address and port else None


def targets_of(wanted: LoadBalancerWanted) -> dict[Target, tuple[str, Family]]:
    """What is to be probed for this document."""
    found: dict[Target, tuple[str, Family]] = {}
    for backend in wanted.backends if wanted.probe is not None else ():
        for family in FAMILIES if backend.state != "removed" else ():
            if wanted.probe is not None and (target := target_of(wanted, backend, family, wanted.probe)):
                found[target] = (backend.id, family)
    return found


@dataclass(slots=True, kw_only=True)
class Failovers:
    """How long it took from learning of an end to the new buckets, in seconds, by how it was learnt."""

    buckets: Counter[tuple[str, float]] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.counts[kind] += 1
        self.sums[kind] = self.sums.get(kind, 0.0) + seconds
        for bound in BUCKET_BOUNDS:
            if seconds <= bound:
                self.buckets[kind, bound] += 1
