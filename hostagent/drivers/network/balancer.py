"""All load balancers of this host at work: what is known of their backends becomes buckets of the table.

The one rule: whatever is learnt only marks a service as to be looked at; one task looks, writes all services that changed in
one transaction, and then ends the flows of backends that are gone. Ten things learnt at once cost one write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from hostagent.drivers.network.balancer_buckets import Table
from hostagent.drivers.network.balancer_health import ServiceHealth
from hostagent.drivers.network.balancer_late import late_part
from hostagent.drivers.network.balancer_learning import Learning
from hostagent.drivers.network.balancer_long import Offload
from hostagent.drivers.network.balancer_memory import BalancerMemory
from hostagent.drivers.network.balancer_rules import (
    Family,
    Guard,
    bucket_change,
    class_of,
    guard_of,
    guard_part,
    has_ways,
    offload_part,
    service_part,
    shared_part,
    ways_part,
)
from hostagent.drivers.network.balancer_service import Failovers, Opinions, Service
from hostagent.drivers.network.protocol import FlowDriver, RuleChange, RulePart
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.drivers.network.table import MARK_BACKEND_MASK
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import LoadBalancerWanted

logger = logging.getLogger(__name__)
RETRY_SECONDS = 1.0
SHARED = "balancer"
OFFLOAD = f"{SHARED}/offload"
WAYS = f"{SHARED}/ways"
LATE = f"{SHARED}/late"


class Written(NamedTuple):
    """What of a service was written last."""

    tables: dict[Family, Table]
    opinions: Opinions
    is_new: bool


class Balancers(Learning):
    """`flows`: where the flows that carry a mark are ended; `on_change` is told which service is seen differently now.

    `uplinks`: the links between which long flows go by the flowtable, () where the kernel cannot or no link is trusted; to be
    set before `restore`.
    """

    def __init__(self, rules: Ruleset, directory: Path, flows: FlowDriver) -> None:
        super().__init__()
        self.uplinks: tuple[str, ...] = ()
        self.failovers = Failovers()
        self.on_change: Callable[[str], None] = lambda _id: None
        self._rules = rules
        self._memory = BalancerMemory(directory)
        self._guards: Counter[Guard] = Counter()
        self._flows = flows
        self._offload = Offload(flows, self._pause_offload)
        self._dirty: set[str] = set()
        self._learnt: dict[str, tuple[str, float]] = {}
        self._gone_marks: list[int] = []
        self._shared: set[str] = set()
        self._news = asyncio.Event()
        self._waiters: list[asyncio.Future[None]] = []
        self._writer: asyncio.Task[None] | None = None

    def restore(self, documents: Iterable[LoadBalancerWanted]) -> dict[str, RulePart]:
        """Every part of the table, from the documents alone: once, before the table is written at the agent's start."""
        for wanted in documents:
            self._take(wanted, assume_up=True)
        parts = self._render(self.services)
        self._shared = {name for name in parts if name.startswith(SHARED)}
        return parts

    def start(self) -> None:
        """Begin to probe and to write."""
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_for_ever(), name="balancer")
            for service in self.services.values():
                self._probe(service, assume_up=True)
            self._mark_dirty(*self.services)

    async def take(self, wanted: LoadBalancerWanted) -> None:
        """In the table afterwards. Raises AgentError as `Ruleset.put` does, and `loadbalancer.marks_exhausted`."""
        self._probe(self._take(wanted, assume_up=False), assume_up=False)
        await self._flush(wanted.id)

    async def remove(self, service_id: str) -> None:
        """Out of the table afterwards, its flows ended. Absent is success."""
        service = self.services.pop(service_id, None)
        if service is not None:
            self._forget_indexes(service)
            self.prober.want(service_id, ())
            if service.timer is not None:
                service.timer.cancel()
            self._guards[service.guard] -= 1
        self._gone_marks.extend(self._memory.forget(service_id))
        await self._flush(service_id)

    async def leave(self, nic_ids: Iterable[str]) -> None:
        """A machine of this host with these nics is going to be stopped: it gets no new flows from now on."""
        for service_id in self.leaving(nic_ids, is_leaving=True):
            try:
                await self._flush(service_id)
            except AgentError as error:  # it is stopped all the same
                logger.warning("a backend that is stopped keeps its buckets: %s", error)

    async def close(self) -> None:
        self.prober.close()
        for service in self.services.values():
            if service.timer is not None:
                service.timer.cancel()
        tasks = [*self._tasks, *([self._writer] if self._writer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._writer = None

    def is_written(self, wanted: LoadBalancerWanted) -> bool:
        service = self.services.get(wanted.id)
        is_right = service is not None and service.wanted == wanted and not service.is_new
        return is_right and self._rules.is_intact

    def _take(self, wanted: LoadBalancerWanted, *, assume_up: bool) -> Service:
        ports = {listener.target_port for listener in wanted.listeners}
        names = [backend.id for backend in wanted.backends if backend.state != "removed"]
        states = {b.id: b.state for b in wanted.backends if b.state in ("draining", "ejected")}
        memory, gone = self._memory.remember(wanted.id, [(port, name) for port in ports for name in names], states)
        self._gone_marks.extend(gone)
        service = self.services.get(wanted.id)
        if service is None:
            health = ServiceHealth(wanted, assume_up=assume_up)
            service = self.services[wanted.id] = Service(wanted=wanted, health=health, marks={})
        else:
            self._forget_indexes(service)
            self._guards[service.guard] -= 1
        flow_class = class_of(wanted)
        service.wanted, service.is_new, service.homes = wanted, True, {}
        service.marks = {key: mark | flow_class for key, mark in memory.marks.items()}
        service.guard = guard_of(wanted)
        self._guards[service.guard] += 1
        service.health.replace(wanted)
        for name, (_, since) in memory.away.items():
            service.health.facts[name].away_since = since
        service.drained &= memory.away.keys()
        self._index(service)
        return service

    def _learn(self, service_id: str, kind: str, at: float | None = None) -> None:
        self._learnt.setdefault(service_id, (kind, time.monotonic() if at is None else at))
        self._mark_dirty(service_id)

    def _mark_dirty(self, *service_ids: str) -> None:
        self._dirty.update(service_ids)
        self._news.set()

    # Writing.

    async def _flush(self, service_id: str) -> None:
        self._mark_dirty(service_id)
        if self._writer is None:
            await self._write()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def _write_for_ever(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            waiters, self._waiters = self._waiters, []
            failure: Exception | None = None
            try:
                await self._write()
            except Exception as error:
                failure = error
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._news.set)
                if isinstance(error, AgentError):
                    logger.warning("load balancers cannot be written: %s", error)
                else:
                    logger.exception("writing load balancers")
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(failure) if failure else waiter.set_result(None)

    async def _write(self) -> None:
        dirty, self._dirty = self._dirty, set()
        learnt, self._learnt = self._learnt, {}
        services = {name: self.services[name] for name in dirty & self.services.keys()}
        before = {name: Written(one.tables, one.opinions, one.is_new) for name, one in services.items()}
        parts: dict[str, RulePart | None] = dict(self._render(services))
        parts |= {f"loadbalancer/{name}": None for name in dirty - self.services.keys()}
        parts |= dict.fromkeys(self._unused(), None)
        try:
            if parts:
                await self._rules.put(parts, change=self._bucket_change(services, before, parts))
        except BaseException:
            self._dirty |= dirty
            self._learnt = {**self._learnt, **learnt}
            for name, service in services.items():
                service.tables, service.opinions, service.is_new = before[name].tables, before[name].opinions, True
            raise
        self._shared |= {name for name, part in parts.items() if part is not None and name.startswith(SHARED)}
        self._shared -= {name for name, part in parts.items() if part is None}
        for name, service in services.items():
            self._after(service, before[name], learnt.get(name))
        gone, self._gone_marks = self._gone_marks, []
        for mark in gone:
            self._background(self._forget(mark))

    def _render(self, services: dict[str, Service]) -> dict[str, RulePart]:
        """The parts of those services whose part changes, and whatever they stand on that is not there yet."""
        now, wall = time.monotonic(), time.time()
        parts: dict[str, RulePart] = {}
        for name, service in services.items():
            service.opinions, tables = service.think(now, wall)
            if tables == service.tables and not service.is_new:
                continue
            service.tables, service.is_new = tables, False
            parts[f"loadbalancer/{name}"] = service_part(service.wanted, service.marks, tables)
            if (shared := f"{SHARED}/{service.guard.name}") not in self._shared:
                parts[shared] = guard_part(service.guard)
            if has_ways(service.wanted) and WAYS not in self._shared:
                parts[WAYS] = ways_part()
            if class_of(service.wanted) and LATE not in self._shared:
                parts[LATE] = late_part()
        if parts and SHARED not in self._shared:
            parts[SHARED] = shared_part(offloads=bool(self.uplinks))
            parts |= {OFFLOAD: offload_part(self.uplinks)} if self.uplinks else {}
        return parts

    @staticmethod
    def _bucket_change(
        services: dict[str, Service], before: dict[str, Written], parts: Mapping[str, RulePart | None]
    ) -> RuleChange | None:
        """When only one known service's buckets move, which: comparing all that it has would take longer than all else."""
        names = list(parts)
        service = services.get(names[0].removeprefix("loadbalancer/")) if len(names) == 1 else None
        if service is None or before[service.wanted.id].is_new:
            return None
        return bucket_change(service.wanted, service.marks, before[service.wanted.id].tables, service.tables)

    def _unused(self) -> set[str]:
        """Shared parts that no service stands on any more."""
        used = {f"{SHARED}/{guard.name}" for guard, services in self._guards.items() if services > 0}
        used |= {WAYS} if any(has_ways(service.wanted) for service in self.services.values()) else set()
        used |= {LATE} if any(class_of(service.wanted) for service in self.services.values()) else set()
        return self._shared - used - ({SHARED, OFFLOAD} if self.services else set())

    def _after(self, service: Service, before: Written, learnt: tuple[str, float] | None) -> None:
        """The table is written: count, end flows, set the clock, tell."""
        now, wall, name = time.monotonic(), time.time(), service.wanted.id
        if learnt is not None and before.tables and before.tables != service.tables:
            self.failovers.add(learnt[0], now - learnt[1])
        for backend, word in service.changes(before.opinions):
            if word.startswith("down: ") or word == "ejected":
                self._background(self._end(service, backend))
            elif word.startswith("held: "):
                self._background(self._confirm(name, backend, "is_refuted", now))
        for backend, seconds in list(service.undrained(wall)):
            if seconds <= 0:
                service.drained.add(backend)
                self._background(self._end(service, backend))
        if service.timer is not None:
            service.timer.cancel()
        seconds = service.next_look(now, wall)
        service.timer = None
        if seconds is not None:
            service.timer = asyncio.get_running_loop().call_later(seconds, self._mark_dirty, name)
        if before.opinions != service.opinions:
            self.on_change(name)

    async def _forget(self, mark: int) -> None:
        await self._flows.delete_marked(mark & MARK_BACKEND_MASK, MARK_BACKEND_MASK)
        if self.uplinks:
            await self._offload.forget(mark & MARK_BACKEND_MASK)

    async def _pause_offload(self, is_paused: bool) -> None:
        if OFFLOAD in self._shared:
            await self._rules.put({OFFLOAD: None if is_paused else offload_part(self.uplinks)})

    async def _end(self, service: Service, name: str) -> None:
        for (_, backend), mark in service.marks.items():
            if backend == name:
                await self._forget(mark)
