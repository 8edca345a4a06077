"""The agent's side of the load-balancer benchmark: a loaded table, and how quickly it turns.

The one rule: what is timed ends when the kernel has the new buckets, not when they were asked for.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_buckets import fill, moved, share_out
from hostagent.drivers.network.balancer_notices import Notices
from hostagent.drivers.network.conntrack import Conntrack
from hostagent.drivers.network.fake import FakeFlows, FakeRules
from hostagent.drivers.network.firewall_table import combination_part, firewall_boxes, firewall_part, nic_part, policy_part
from hostagent.drivers.network.nft import best
from hostagent.drivers.network.protocol import RulePart
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.protocol.network import (
    BackendWanted,
    FirewallRuleWanted,
    FirewallWanted,
    ListenerWanted,
    LoadBalancerWanted,
    NoticePeerWanted,
    NoticesWanted,
    PolicyWanted,
)
from hostagent.protocol.wanted import Generation, NicWanted
from tests.bench.loadbalancer_stage import BACKENDS, OURS, PORT, backend, mac

ONE = Generation(epoch=1, number=1)
SERVICES, NICS, FIREWALLS = 1000, 1000, 50


def service(number: int) -> LoadBalancerWanted:
    """Number 0 is the one that carries the load."""
    vip = OURS if number == 0 else f"10.{100 + number // 250}.{number % 250}.1"
    addresses = [
        backend(2, n) if number == 0 else f"10.{120 + number // 250}.{number % 250}.{n}" for n in range(1, BACKENDS + 1)
    ]
    return LoadBalancerWanted(
        id=f"lb_{number:012d}",
        generation=ONE,
        vips=(vip,),
        listeners=(ListenerWanted(protocol="tcp", port=443, target_port=PORT),),
        backends=tuple(
            BackendWanted(id=f"bk_{number}_{n}", ipv4=address, nic_id=nic_id(n) if number == 0 else f"nic_x{number}_{n}")
            for n, address in enumerate(addresses, 1)
        ),
        new_connections_per_second_per_source=100_000,
        connections_per_source=50_000,
        client_address="kept",
    )


def nic_id(number: int) -> str:
    return f"nic_{number:012d}"


def firewall_parts() -> dict[str, RulePart]:
    """The policy, FIREWALLS firewalls of ten rules, NICS nics of which the first ones are the backends."""
    parts = {"policy": policy_part(PolicyWanted(id="policy", generation=ONE, infrastructure_cidrs=("192.0.2.0/24",)))}
    firewalls = {}
    for number in range(FIREWALLS):
        rules = tuple(
            FirewallRuleWanted(
                direction="ingress", action="allow", protocol="tcp", cidrs=(f"10.{number}.0.0/16",), port_first=p, port_last=p
            )
            for p in range(1000, 1010)
        )
        name = f"fw_{number:012d}"
        wanted = FirewallWanted(id=name, generation=ONE, rules=rules, members=())
        firewalls[name] = firewall_part(name, firewall_boxes(wanted))
        parts[f"firewall/{name}"] = firewalls[name]
        parts[f"combination/{name}"] = combination_part({name: firewalls[name]}, restricts_egress=False)
    for number in range(1, NICS + 1):
        parts[f"nic/{nic_id(number)}"] = machine(number)
    return parts


def machine(number: int) -> RulePart:
    address = backend(2, number) if number <= BACKENDS else f"10.{200 + number // 250}.{number % 250}.9"
    hardware = mac(number) if number <= BACKENDS else f"06:00:00:01:{number // 256:02x}:{number % 256:02x}"
    nic = NicWanted(id=nic_id(number), generation=ONE, mac=hardware, ipv4=address, ipv6="")
    return nic_part(nic, [f"fw_{number % FIREWALLS:012d}"], filters_egress=False)


class Edge:
    def __init__(self, directory: Path) -> None:
        self.rules = Ruleset(best())
        self.flows = Conntrack()
        self.balancers = Balancers(self.rules, directory, self.flows)
        self.written = asyncio.Event()
        self._watched = service(0).id
        self.balancers.on_change = lambda name: self.written.set() if name == self._watched else None

    def watch(self, number: int) -> None:
        """`written` is set by the next change of this service."""
        self._watched = service(number).id
        self.written.clear()

    async def start(self) -> float:
        started = time.perf_counter()
        parts = self.balancers.restore(service(number) for number in range(SERVICES))
        await self.rules.start({**parts, **firewall_parts()})
        self.balancers.start()
        return time.perf_counter() - started

    async def turn(self, *, is_running: bool) -> None:
        """Until the buckets of the loaded service are written."""
        self.watch(0)
        self.balancers.machine([nic_id(1)], is_running=is_running)
        await self.written.wait()

    async def close(self) -> None:
        await self.balancers.close()
        await self.rules.close()
        self.flows.close()


async def swaps(edge: Edge, rounds: int) -> list[float]:
    found = []
    for number in range(2 * rounds):
        await asyncio.sleep(0.02)  # what follows a swap (flows are ended) is over
        started = time.perf_counter()
        await edge.turn(is_running=bool(number % 2))
        found.append(1000 * (time.perf_counter() - started))
    return found


async def process_ends(edge: Edge, rounds: int) -> list[float]:
    """From the signal that kills a machine's process to the new buckets, by its pidfd."""
    loop, found = asyncio.get_running_loop(), []
    for _ in range(rounds):
        child = await asyncio.create_subprocess_exec("sleep", "60")
        descriptor = os.pidfd_open(child.pid)
        ended = asyncio.Event()

        def on_end() -> None:
            edge.balancers.machine([nic_id(1)], is_running=False)
            loop.remove_reader(descriptor)
            ended.set()

        loop.add_reader(descriptor, on_end)
        await asyncio.sleep(0.01)
        edge.watch(0)
        started = time.perf_counter()
        child.kill()
        await edge.written.wait()
        found.append(1000 * (time.perf_counter() - started))
        os.close(descriptor)
        await child.wait()
        await edge.turn(is_running=True)
    return found


class Pair:
    """A backend's host and this edge, talking over loopback: service 1's first machine is the host's."""

    def __init__(self, edge: Edge) -> None:
        self.edge_end, self.host_end = (
            Notices(edge.balancers),
            Notices(Balancers(Ruleset(FakeRules()), Path("/nonexistent"), FakeFlows())),
        )
        self.nic = service(1).backends[0].nic_id
        self.edge_end.is_ready = self.host_end.is_ready = True

    async def start(self) -> None:
        key, ports = os.urandom(32).hex(), {"edge": 47021, "host": 47022}

        def document(mine: str, other: str, **lists: tuple[str, ...]) -> NoticesWanted:
            peer = NoticePeerWanted(host_id=other, address="127.0.0.1", port=ports[other], key=key, **lists)
            return NoticesWanted(
                id="notices", generation=ONE, host_id=mine, listen_address="127.0.0.1", listen_port=ports[mine], peers=(peer,)
            )

        self.document = document("host", "edge", sends=(self.nic,))
        await self.edge_end.take(document("edge", "host", accepts=(self.nic,)))
        await self.host_end.take(self.document)
        while self.edge_end.heard() != {"host": True}:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.host_end.close()
        self.edge_end.close()


async def notices(edge: Edge, pair: Pair, rounds: int) -> list[float]:
    """From the end of a machine's process on its own host to the new buckets on another host, an edge."""
    found = []
    for _ in range(rounds):
        child = await asyncio.create_subprocess_exec("sleep", "60")
        descriptor = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(
            descriptor,
            lambda: (asyncio.get_running_loop().remove_reader(descriptor), pair.host_end.machine([pair.nic], is_running=False)),
        )
        edge.watch(1)
        started = time.perf_counter()
        child.kill()
        await edge.written.wait()
        found.append(1000 * (time.perf_counter() - started))
        os.close(descriptor)
        await child.wait()
        edge.watch(1)
        pair.host_end.machine([pair.nic], is_running=True)
        await edge.written.wait()
    return found


async def silences(edge: Edge, pair: Pair, rounds: int) -> list[float]:
    """From the last word of a host that dies (its machines with it) to the new buckets."""
    found = []
    for _ in range(rounds):
        edge.watch(1)
        started = time.perf_counter()
        pair.host_end._close_transport()
        await edge.written.wait()
        found.append(1000 * (time.perf_counter() - started))
        edge.watch(1)
        await pair.host_end.take(pair.document)
        await edge.written.wait()
        await asyncio.sleep(0.3)
    return found


async def elements(edge: Edge, rounds: int) -> list[float]:
    """Taking the thousandth machine out, and putting it in again."""
    name, found = f"nic/{nic_id(NICS)}", []
    part = machine(NICS)
    for number in range(2 * rounds):
        await asyncio.sleep(0.005)
        started = time.perf_counter()
        await edge.rules.put({name: part if number % 2 else None})
        found.append(1000 * (time.perf_counter() - started))
    return found


async def thousandth_services(edge: Edge, rounds: int) -> list[float]:
    name, wanted, found = service(SERVICES - 1).id, service(SERVICES - 1), []
    for number in range(2 * rounds):
        await asyncio.sleep(0.005)
        started = time.perf_counter()
        if number % 2:
            await edge.balancers.take(replace(wanted, generation=Generation(epoch=1, number=number + 2)))
        else:
            await edge.balancers.remove(name)
        found.append(1000 * (time.perf_counter() - started))
    return found


def flows_moved() -> float:
    """The largest part of flows that move besides those of the backend that goes, over many services of 2 to 16 backends."""
    worst = 0.0
    for count in range(2, 17):
        weights = {f"bk_{count}_{n}": 1 for n in range(count)}
        homes = fill(weights)
        for gone in weights:
            after = share_out(homes, weights, {gone: 0.0})
            worst = max(worst, (len(moved(homes, after)) - homes.count(gone)) / len(homes))
    return worst
