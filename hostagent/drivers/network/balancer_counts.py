"""Counters of backends out of the table: for the circuit breakers each second, for /metrics when asked.

The one rule: reading is done off the event loop and never by the rules' helper. The kernel counts by mark; a backend's marks,
one for each target port, are added up here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hostagent.drivers.network import balancer_kernel
from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_circuit import CLOSED, OPEN, Circuit, Counts
from hostagent.drivers.network.balancer_long import LongFlows
from hostagent.drivers.network.balancer_rules import COUNTERS
from hostagent.drivers.network.balancer_service import BUCKET_BOUNDS
from hostagent.protocol.verbs import BackendTraffic

logger = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
FRESH_SECONDS = 5.0
Readings = dict[str, dict[int, tuple[int, int]]]
Name = tuple[str, str]  # (service, backend)


class Sample(NamedTuple):
    """Counters, and flows by mark; None: there are too many to count."""

    at: float
    readings: Readings
    flows: Counter[int] | None
    offloaded: int

    def of(self, name: str, marks: Iterable[int]) -> BackendTraffic:
        found = {key: [values.get(mark, (0, 0)) for mark in marks] for key, values in self.readings.items()}
        packets = {key: sum(one[0] for one in each) for key, each in found.items()}
        return BackendTraffic(
            id=name,
            bytes_in=sum(one[1] for one in found.get("lb_in", ())),
            bytes_out=sum(one[1] for one in found.get("lb_out", ())),
            packets_in=packets.get("lb_in", 0),
            packets_out=packets.get("lb_out", 0),
            flows=packets.get("lb_flows", 0),
            refused=packets.get("lb_refused", 0),
            resets=packets.get("lb_resets", 0),
            live_flows=sum(self.flows[mark] for mark in marks) if self.flows is not None else None,
        )


class BalancerCounts:
    def __init__(self, balancers: Balancers) -> None:
        self._balancers = balancers
        self._circuits: dict[Name, Circuit] = {}
        self._long = LongFlows()
        self._task: asyncio.Task[None] | None = None
        self._sample: Sample | None = None
        self._sampling = asyncio.Lock()

    def start(self) -> None:
        self._task = self._task or asyncio.create_task(self._watch(), name="circuits")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
                await self.look_at_long_flows()
            except Exception:
                logger.exception("looking at circuits")

    async def look(self) -> None:
        """Take a sample of every backend of a service with a circuit, and tell what opened or closed."""
        services = {name: one for name, one in self._balancers.services.items() if one.wanted.circuit is not None}
        self._circuits = {key: circuit for key, circuit in self._circuits.items() if key[0] in services}
        if not services:
            return
        counts = counted(self._balancers, await read(("lb_flows", "lb_accepted", "lb_refused", "lb_resets")))
        now = time.monotonic()
        for service_id, service in services.items():
            wanted = service.wanted.circuit
            for backend in service.wanted.backends:
                if wanted is None or backend.state == "removed":
                    continue
                circuit = self._circuits.setdefault((service_id, backend.id), Circuit())
                if circuit.look(wanted, counts.get((service_id, backend.id), Counts()), now):
                    self._balancers.circuit(service_id, backend.id, circuit.state)

    async def look_at_long_flows(self, *, is_asked: bool = False) -> None:
        if self._balancers.uplinks:
            await asyncio.to_thread(self._long.look, is_asked=is_asked)
            self._long.keep(names_of_marks(self._balancers))

    async def lines(self) -> list[str]:
        """Prometheus text."""
        sample = self._sample = await self._take_sample()
        traffic = self._traffic_lines(sample.readings, sample.flows or Counter())
        return [*self._state_lines(), *traffic, *self._failover_lines(), *_plain(sample.offloaded)]

    async def traffic(self, service_id: str) -> tuple[BackendTraffic, ...]:
        """What each backend of a service has carried; who asks for many services at once reads the table once."""
        if (service := self._balancers.services.get(service_id)) is None:
            return ()
        async with self._sampling:
            if self._sample is None or time.monotonic() - self._sample.at > FRESH_SECONDS:
                self._sample = await self._take_sample()
        marks: dict[str, list[int]] = {backend.id: [] for backend in service.wanted.backends if backend.state != "removed"}
        for (_, name), mark in service.marks.items():
            marks.setdefault(name, []).append(mark)
        return tuple(self._sample.of(name, found) for name, found in marks.items())

    async def _take_sample(self) -> Sample:
        at = time.monotonic()
        readings = await read(COUNTERS) if self._balancers.services else {}
        if readings:
            await self.look_at_long_flows(is_asked=True)
        readings = {name: _together(found, self._long.sums.get(name, {})) for name, found in readings.items()}
        if not readings:
            return Sample(at, readings, None, 0)
        return Sample(at, readings, *await asyncio.to_thread(balancer_kernel.live_flows))

    def _state_lines(self) -> Iterator[str]:
        yield "# TYPE bedplate_lb_backend_up gauge"
        for service_id, service in self._balancers.services.items():
            for backend in service.wanted.backends:
                shares = [found[backend.id].share for found in service.opinions.values() if backend.id in found]
                if shares:
                    yield f"bedplate_lb_backend_up{_labels(service_id, backend.id)} {int(max(shares) > 0)}"
        yield "# TYPE bedplate_lb_circuit_state gauge"
        for (service_id, name), circuit in self._circuits.items():
            state = {CLOSED: 0, OPEN: 2}.get(circuit.state, 1)
            yield f"bedplate_lb_circuit_state{_labels(service_id, name)} {state}"
        yield "# TYPE bedplate_lb_brakes_total counter"
        yield f"bedplate_lb_brakes_total {sum(one.health.brakes for one in self._balancers.services.values())}"
        yield "# TYPE bedplate_lb_probes_total counter"
        yield f"bedplate_lb_probes_total {self._balancers.prober.attempts}"

    def _traffic_lines(self, readings: Readings, live: Counter[int]) -> Iterator[str]:
        names = names_of_marks(self._balancers)
        for metric, kind, label, sets in (
            ("bedplate_lb_backend_bytes_total", 1, "direction", {"in": "lb_in", "out": "lb_out"}),
            ("bedplate_lb_backend_packets_total", 0, "direction", {"in": "lb_in", "out": "lb_out"}),
            ("bedplate_lb_backend_errors_total", 0, "kind", {"refused": "lb_refused", "reset": "lb_resets"}),
            ("bedplate_lb_backend_flows_total", 0, "", {"": "lb_flows"}),
        ):
            yield f"# TYPE {metric} counter"
            for value, set_name in sets.items():
                sums: Counter[Name] = Counter()
                for mark, found in readings.get(set_name, {}).items():
                    if mark in names:
                        sums[names[mark]] += found[kind]
                more = f',{label}="{value}"' if label else ""
                yield from (f"{metric}{_labels(*name, more)} {number}" for name, number in sums.items())
        yield "# TYPE bedplate_lb_backend_live_flows gauge"
        present: Counter[Name] = Counter()
        for mark, number in live.items():
            if mark in names:
                present[names[mark]] += number
        yield from (f"bedplate_lb_backend_live_flows{_labels(*name)} {number}" for name, number in present.items())

    def _failover_lines(self) -> Iterator[str]:
        failovers = self._balancers.failovers
        yield "# TYPE bedplate_lb_failover_seconds histogram"
        for kind, count in failovers.counts.items():
            for bound in BUCKET_BOUNDS:
                number = failovers.buckets[kind, bound]
                yield f'bedplate_lb_failover_seconds_bucket{{kind="{kind}",le="{bound}"}} {number}'
            yield f'bedplate_lb_failover_seconds_bucket{{kind="{kind}",le="+Inf"}} {count}'
            yield f'bedplate_lb_failover_seconds_sum{{kind="{kind}"}} {failovers.sums[kind]:.6f}'
            yield f'bedplate_lb_failover_seconds_count{{kind="{kind}"}} {count}'


async def read(names: tuple[str, ...]) -> Readings:
    def work() -> Readings:
        return {name: balancer_kernel.counters(name) for name in names}

    return await asyncio.to_thread(work)


def _together(one: dict[int, tuple[int, int]], other: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    added = {mark: (one[mark][0] + packets, one[mark][1] + size) for mark, (packets, size) in other.items() if mark in one}
    return one | added


def counted(balancers: Balancers, readings: Readings) -> dict[Name, Counts]:
    sums: dict[Name, Counter[str]] = {}
    for mark, name in names_of_marks(balancers).items():
        found = sums.setdefault(name, Counter())
        for set_name, values in readings.items():
            found[set_name.removeprefix("lb_")] += values.get(mark, (0, 0))[0]
    return {name: Counts(**found) for name, found in sums.items()}


def names_of_marks(balancers: Balancers) -> dict[int, Name]:
    return {
        mark: (service_id, backend)
        for service_id, service in balancers.services.items()
        for (_, backend), mark in service.marks.items()
    }


def _plain(offloaded: int) -> Iterator[str]:
    yield "# TYPE bedplate_lb_offloaded_flows gauge"
    yield f"bedplate_lb_offloaded_flows {offloaded}"


def _labels(service_id: str, backend: str, more: str = "") -> str:
    return f'{{loadbalancer="{service_id}",backend="{backend}"{more}}}'
