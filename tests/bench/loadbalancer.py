"""What the load balancer costs and how quickly it turns: `python -m tests.bench.loadbalancer --json [--quick]`.

The agent's table with firewalls, limits, counters and 1,000 services, beside a bare jhash map, HAProxy (TCP) and nginx (stream) of
the distribution, in network namespaces, in turns. CPU is that of all processes that take part, kernel work included, less the same
over the direct path in the same turn; it repeats on a busy machine, where the whole machine's would not. Medians of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.agent.balancing import ip
from tests.bench.loadbalancer_edge import (
    Edge,
    Pair,
    elements,
    flows_moved,
    notices,
    process_ends,
    silences,
    swaps,
    thousandth_services,
)
from tests.bench.loadbalancer_memory import resident_mib
from tests.bench.loadbalancer_probes import sustained
from tests.bench.loadbalancer_request import request_failover
from tests.bench.loadbalancer_stage import Stage, added, in_turns, median, row, staged

MODES = ("direct", "bare", "ours", "haproxy", "nginx")
Found = dict[str, list[dict[str, float]]]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def measure_paths() -> list[dict[str, Any]]:
    """Only what compares with the peers: a minute, which real-time priority may be given to."""

    async def work(stage: Stage, directory: Path) -> list[dict[str, Any]]:
        edge = Edge(directory)
        try:
            await edge.start()
            rows = pace_rows(in_turns(stage, MODES, 5, {"do": "paced", "rate": 1000, "seconds": 2}))
            return [*rows, *cost_rows(in_turns(stage, MODES, 21, {"do": "connections", "count": 300}), 300)]
        finally:
            await edge.close()

    with staged() as stage, tempfile.TemporaryDirectory(prefix="bedplate-bench-") as directory:
        return asyncio.run(work(stage, Path(directory)))


def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    rounds, count, turns = (2, 100, 20) if is_quick else (31, 400, 200)
    request = request_failover(seconds=1 if is_quick else 3, rounds=1 if is_quick else 3)
    with staged() as stage, tempfile.TemporaryDirectory(prefix="bedplate-bench-") as directory:
        rows = asyncio.run(_measure(stage, Path(directory), rounds, count, turns))
    rows += [row(f"{kind}_probes_per_second_sustained", number, "1/s") for kind, number in sustained().items()]
    rows += [row(name, number, "MiB") for name, number in resident_mib().items()]
    return [*rows, row("failover_request_ms", statistics.median(request), "ms")]


async def _measure(stage: Stage, directory: Path, rounds: int, count: int, turns: int) -> list[dict[str, Any]]:
    edge = Edge(directory)
    pair = Pair(edge)
    ip("route", "add", "10.120.1.0/24", "dev", "c0")  # where nobody answers
    try:
        loaded = await edge.start()
        rows = cost_rows(in_turns(stage, MODES, rounds, {"do": "connections", "count": count}), count)
        rows += pace_rows(in_turns(stage, MODES, max(2, rounds // 6), {"do": "paced", "rate": 1000, "seconds": count / 200}))
        size = count * 625_000
        rows += stream_rows(in_turns(stage, MODES, max(2, rounds // 6), {"do": "stream", "size": size}), size)
        rows += time_rows("backend_swap", await swaps(edge, turns))
        rows += time_rows("failover_process", await process_ends(edge, turns // 2), median="failover_process_ms")
        rows += time_rows("element_1000th", await elements(edge, turns))
        rows += time_rows("service_1000th", await thousandth_services(edge, turns // 2))
        await pair.start()
        rows += time_rows("failover", await notices(edge, pair, turns // 4), median="failover_ms")
        rows += time_rows("failover_silent", await silences(edge, pair, max(3, turns // 20)), median="failover_silent_ms")
        rows.append(row("flows_moved_over_ideal", flows_moved(), "share"))
        rows.append(row("load_1000_services_seconds", loaded, "s"))
    finally:
        pair.close()
        await edge.close()
    return rows


def cost_rows(found: Found, count: int) -> list[dict[str, Any]]:
    cpu = {mode: added(found, mode, "cpu") / 1000 / count for mode in MODES}
    rows = [row("added_cpu_us_per_connection", cpu["ours"], "µs", "bare map", cpu["bare"])]
    rows.append(row("cpu_us_per_connection_direct", median(found, "direct", "cpu") / 1000 / count, "µs"))
    rows += [row(f"added_cpu_vs_{peer}", cpu["ours"], "µs", peer, cpu[peer]) for peer in ("haproxy", "nginx")]
    for key in ("p50_us", "p99_us"):
        name, ours = f"added_latency_{key.removesuffix('_us')}_vs", added(found, "ours", key)
        rows += [row(f"{name}_{peer}", ours, "µs", peer, added(found, peer, key)) for peer in ("haproxy", "nginx", "bare")]
    return rows


def pace_rows(found: Found) -> list[dict[str, Any]]:
    ms = {mode: median(found, mode, "p99_us") / 1000 for mode in MODES}
    rows = [row("p99_ms_at_1000_rps", ms["ours"], "ms", "direct", ms["direct"])]
    rows += [row(f"p99_at_1000_rps_vs_{peer}", ms["ours"], "ms", peer, ms[peer]) for peer in ("nginx", "haproxy", "bare")]
    rows.append(row("failed_at_1000_rps", sum(one["failed"] for one in found["ours"]), "requests"))
    return rows


def stream_rows(found: Found, size: int) -> list[dict[str, Any]]:
    rows = []
    cpu = {mode: median(found, mode, "cpu") / size for mode in MODES}  # nanoseconds a byte: seconds a GB
    rate = {mode: size / 1e9 / median(found, mode, "seconds") for mode in MODES}
    for peer in ("direct", "haproxy", "nginx"):
        rows.append(row(f"cpu_seconds_per_gb_vs_{peer}", cpu["ours"], "s/GB", peer, cpu[peer]))
        rows.append(row(f"stream_gb_per_second_vs_{peer}", rate["ours"], "GB/s", peer, rate[peer]))
    return rows


def time_rows(name: str, values: list[float], *, median: str = "") -> list[dict[str, Any]]:
    rows = [row(median or f"{name}_p50_ms", percentile(values, 0.5), "ms")]
    return [*rows, row(f"{name}_p95_ms", percentile(values, 0.95), "ms"), row(f"{name}_p99_ms", percentile(values, 0.99), "ms")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    parser.add_argument("--paths", action="store_true", help="only what compares with the peers")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows = measure_paths() if options.paths else measure(is_quick=options.quick)
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
        "command": "python -m tests.bench.loadbalancer" + " --quick" * options.quick + " --paths" * options.paths,
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
