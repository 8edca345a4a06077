"""What the load balancer costs and how quickly it turns: `python -m tests.bench.loadbalancer --json [--quick]`.

The agent's table with firewalls, limits, counters and 1,000 services, beside a bare jhash map, HAProxy (TCP) and nginx (stream) of
the distribution, in network namespaces, in turns. CPU is that of all processes that take part, kernel work included, less the same
over the direct path; it repeats on a busy machine, where the whole machine's would not. Medians of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_buckets import fill, moved, share_out
from hostagent.drivers.network.conntrack import Conntrack
from hostagent.drivers.network.firewall_table import combination_part, firewall_boxes, firewall_part, nic_part, policy_part
from hostagent.drivers.network.nft import best
from hostagent.drivers.network.protocol import RulePart
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.lib.process import open_pidfd
from hostagent.protocol.network import (
    BackendWanted,
    FirewallRuleWanted,
    FirewallWanted,
    ListenerWanted,
    LoadBalancerWanted,
    PolicyWanted,
)
from hostagent.protocol.wanted import Generation, NicWanted
from tests.bench.loadbalancer_stage import BACKENDS, OURS, PORT, Stage, backend, mac, staged

ONE = Generation(epoch=1, number=1)
SERVICES, NICS, FIREWALLS = 1000, 1000, 50
MODES = ("direct", "bare", "ours", "haproxy", "nginx")


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
        self.balancers.on_change = lambda name: (
            self.written.set() if name.endswith("_000000000000") or name == service(0).id else None
        )

    async def start(self) -> float:
        started = time.perf_counter()
        parts = self.balancers.restore(service(number) for number in range(SERVICES))
        await self.rules.start({**parts, **firewall_parts()})
        self.balancers.start()
        return time.perf_counter() - started

    async def turn(self, *, is_running: bool) -> None:
        """Until the buckets of the loaded service are written."""
        self.written.clear()
        self.balancers.machine([nic_id(1)], is_running=is_running)
        await self.written.wait()

    async def close(self) -> None:
        await self.balancers.close()
        await self.rules.close()
        self.flows.close()


async def swaps(edge: Edge, rounds: int) -> list[float]:
    found = []
    for number in range(2 * rounds):
        await asyncio.sleep(0.005)
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
        edge.written.clear()
        started = time.perf_counter()
        child.kill()
        await edge.written.wait()
        found.append(1000 * (time.perf_counter() - started))
        os.close(descriptor)
        await child.wait()
        await edge.turn(is_running=True)
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


def costs(stage: Stage, *, count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median CPU (µs) and latency (µs) of a connection by path, the paths in turns."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 else reversed(MODES):
            host, port = stage.paths()[mode]
            stage.forget_flows()
            before = stage.cpu()
            answer = stage.load.ask("connections", host=host, port=port, count=count)
            found[mode].append({**answer, "cpu_us": (stage.cpu() - before) / 1000 / count})
    return {
        mode: {key: statistics.median(one[key] for one in runs) for key in ("cpu_us", "p50_us", "p99_us")}
        for mode, runs in found.items()
    }


def paced(stage: Stage, *, seconds: float, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES if number % 2 else reversed(MODES):
            host, port = stage.paths()[mode]
            stage.forget_flows()
            found[mode].append(stage.load.ask("paced", host=host, port=port, rate=1000, seconds=seconds))
    return {
        mode: {key: statistics.median(one[key] for one in runs) for key in ("p50_us", "p99_us", "failed")}
        for mode, runs in found.items()
    }


def streams(stage: Stage, *, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds a GB and GB a second of one long flow."""
    found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        for mode in MODES:
            host, port = stage.paths()[mode]
            stage.forget_flows()
            before = stage.cpu()
            answer = stage.load.ask("stream", host=host, port=port, size=size)
            found[mode].append(((stage.cpu() - before) / 1e9 / (size / 1e9), size / 1e9 / answer["seconds"]))
    return {
        mode: {"cpu": statistics.median(c for c, _ in runs), "rate": statistics.median(r for _, r in runs)}
        for mode, runs in found.items()
    }


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


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    rounds, count, turns = (2, 300, 20) if is_quick else (9, 2000, 200)
    with staged() as stage, tempfile.TemporaryDirectory(prefix="bedplate-bench-") as directory:
        return asyncio.run(_measure(stage, Path(directory), rounds, count, turns))


async def _measure(stage: Stage, directory: Path, rounds: int, count: int, turns: int) -> list[dict[str, Any]]:
    edge = Edge(directory)
    try:
        loaded = await edge.start()
        cost = costs(stage, count=count, rounds=rounds)
        at_rate = paced(stage, seconds=count / 400, rounds=max(2, rounds // 2))
        long = streams(stage, size=count * 250_000, rounds=max(2, rounds // 3))
        swap, end = await swaps(edge, turns), await process_ends(edge, turns // 2)
        element, whole = await elements(edge, turns), await thousandth_services(edge, turns // 2)
    finally:
        await edge.close()
    added = {mode: {key: cost[mode][key] - cost["direct"][key] for key in ("cpu_us", "p50_us", "p99_us")} for mode in MODES}
    rows = [row("added_cpu_us_per_connection", added["ours"]["cpu_us"], "µs", "bare map", added["bare"]["cpu_us"])]
    for peer in ("haproxy", "nginx"):
        rows.append(row(f"added_cpu_vs_{peer}", added["ours"]["cpu_us"], "µs", peer, added[peer]["cpu_us"]))
    for peer in ("haproxy", "nginx"):
        rows.append(row(f"added_latency_p50_vs_{peer}", added["ours"]["p50_us"], "µs", peer, added[peer]["p50_us"]))
    rows.append(row("added_latency_p50_vs_bare_map", added["ours"]["p50_us"], "µs", "bare map", added["bare"]["p50_us"]))
    rows.append(row("added_latency_p99_vs_haproxy", added["ours"]["p99_us"], "µs", "haproxy", added["haproxy"]["p99_us"]))
    rows.append(row("p99_ms_at_1000_rps", at_rate["ours"]["p99_us"] / 1000, "ms", "direct", at_rate["direct"]["p99_us"] / 1000))
    rows.append(
        row("p99_at_1000_rps_vs_nginx", at_rate["ours"]["p99_us"] / 1000, "ms", "nginx", at_rate["nginx"]["p99_us"] / 1000)
    )
    rows.append(
        row(
            "p99_at_1000_rps_vs_haproxy", at_rate["ours"]["p99_us"] / 1000, "ms", "haproxy", at_rate["haproxy"]["p99_us"] / 1000
        )
    )
    for peer in ("direct", "haproxy", "nginx"):
        rows.append(row(f"cpu_seconds_per_gb_vs_{peer}", long["ours"]["cpu"], "s/GB", peer, long[peer]["cpu"]))
        rows.append(row(f"stream_gb_per_second_vs_{peer}", long["ours"]["rate"], "GB/s", peer, long[peer]["rate"]))
    rows.append(row("backend_swap_p50_ms", percentile(swap, 0.5), "ms"))
    rows.append(row("backend_swap_p99_ms", percentile(swap, 0.99), "ms"))
    rows.append(row("failover_process_ms", percentile(end, 0.5), "ms"))
    rows.append(row("failover_process_p99_ms", percentile(end, 0.99), "ms"))
    rows.append(row("element_1000th_p50_ms", percentile(element, 0.5), "ms"))
    rows.append(row("service_1000th_p50_ms", percentile(whole, 0.5), "ms"))
    rows.append(row("flows_moved_over_ideal", flows_moved(), "share"))
    rows.append(row("load_1000_services_seconds", loaded, "s"))
    return rows


def row(metric: str, ours: float, unit: str, peer: str | None = None, peer_value: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"metric": metric, "ours": round(ours, 4), "unit": unit}
    if peer is not None and peer_value:
        found |= {"peer": peer, "peer_value": round(peer_value, 4), "ratio": round(ours / peer_value, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure(is_quick=options.quick)
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    report = {
        "name": "loadbalancer",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.2f}",
        "command": "python -m tests.bench.loadbalancer" + (" --quick" if options.quick else ""),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(
        f"{report['date']}, {report['machine']}, `{report['command']}`:\n\n| metric | ours | unit | peer | peer's | ratio |\n|---|---:|---|---|---:|---:|"
    )
    for one in rows:
        print(
            f"| {one['metric']} | {one['ours']} | {one['unit']} | {one.get('peer', '')} | {one.get('peer_value', '')} | {one.get('ratio', '')} |"
        )


if __name__ == "__main__":
    main()
