"""The kernel beside DBOS, procrastinate and plain Celery on the same PostgreSQL: `python -m tests.bench.kernel --json [--quick]`.

A durable step = its effect and its successor committed before the next one starts. Every contender is a process of its own
with a database of its own on one server (fsync on); a client CPU-second is user + system time of that process. The best
peer is the fastest durable one in each unit, DBOS in the quickest of three ways. Celery is not durable.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.embedded.postgres import Postgres
from controlplane.embedded.valkey import Valkey

ROOT = Path(__file__).resolve().parents[2]
DURABLE = {"DBOS": ("dbos", ("throughput", "threads", "transaction")), "procrastinate": ("procrastinate", ("throughput",))}
LATENCY = {"DBOS send": "dbos", "procrastinate": "procrastinate", "Celery (not durable)": "celery"}


@contextlib.contextmanager
def servers() -> Iterator[tuple[Postgres, Valkey]]:
    """PostgreSQL with fsync and Valkey, both thrown away afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-bench-"))
    directory.chmod(0o755)
    postgres, valkey = Postgres(directory=directory / "pg", is_durable=True), Valkey(directory=directory / "vk")
    postgres.prepare()
    valkey.prepare()
    process = postgres.start()
    broker = subprocess.Popen(valkey.argv(), env=valkey.environment(), stdout=subprocess.DEVNULL)
    try:
        asyncio.run(until_ready(valkey))
        yield postgres, valkey
    finally:
        broker.kill()
        broker.wait()
        postgres.stop()
        if process is not None:
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


async def until_ready(valkey: Valkey) -> None:
    async with asyncio.timeout(30):
        while not await valkey.is_ready():
            await asyncio.sleep(0.05)


async def make_database(postgres: Postgres, name: str, *, has_schema: bool) -> str:
    admin = await asyncpg.connect(postgres.url("postgres"))
    await admin.execute(f'CREATE DATABASE "{name}"')
    await admin.close()
    if has_schema:
        from controlplane.models.all import metadata

        engine = create_async_engine(postgres.url(name).replace("postgresql://", "postgresql+asyncpg://"))
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()
    return postgres.url(name)


def contend(postgres: Postgres, valkey: Valkey, contender: str, mode: str, count: int) -> dict[str, Any]:
    """Run one contender; its last line of output is its result."""
    name = f"{contender}_{mode}_{time.time_ns()}"
    url = asyncio.run(make_database(postgres, name, has_schema=contender == "ours"))
    argv = [sys.executable, "-m", f"tests.bench.kernel_{contender}", mode, url, valkey.url, str(count)]
    print(f"… {contender} {mode} {count}", file=sys.stderr, flush=True)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{contender} {mode} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def best_of(results: list[dict[str, Any]]) -> tuple[float, float]:
    """Steps per client CPU-second and per wall second: the median of the rounds."""
    return (
        statistics.median(result["steps"] / result["cpu_s"] for result in results),
        statistics.median(result["steps"] / result["wall_s"] for result in results),
    )


def row(metric: str, ours: float, unit: str, peer: str = "", peer_value: float | None = None) -> dict[str, Any]:
    made: dict[str, Any] = {"metric": metric, "ours": round(ours, 2), "unit": unit}
    if peer_value is not None:
        made |= {"peer": peer, "peer_value": round(peer_value, 2), "ratio": round(ours / peer_value, 2)}
    return made


def measure_throughput(postgres: Postgres, valkey: Valkey, *, chains: int, rounds: int) -> list[dict[str, Any]]:
    """Contenders take turns, so that a busy moment of the machine hits all alike."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for contender, modes in [("ours", ("throughput",)), *DURABLE.values(), ("celery", ("throughput",))]:
            for mode in modes:
                count = chains * 4 if contender == "ours" else chains
                found.setdefault((contender, mode), []).append(contend(postgres, valkey, contender, mode, count))
    per_cpu, per_wall = best_of(found["ours", "throughput"])
    rows, best = [], {"cpu": ("", 0.0), "wall": ("", 0.0)}
    for label, (contender, modes) in DURABLE.items():
        cpu, wall = (max(pair) for pair in zip(*(best_of(found[contender, mode]) for mode in modes), strict=True))
        rows += [
            row(f"steps_per_client_cpu_second_vs_{contender}", per_cpu, "steps/CPU-s", label, cpu),
            row(f"steps_per_second_vs_{contender}", per_wall, "steps/s", label, wall),
        ]
        best["cpu"], best["wall"] = max(best["cpu"], (label, cpu), key=_value), max(best["wall"], (label, wall), key=_value)
    cpu, wall = best_of(found["celery", "throughput"])
    rows += [
        row("steps_per_client_cpu_second_vs_celery", per_cpu, "steps/CPU-s", "Celery (not durable)", cpu),
        row("steps_per_second_vs_celery", per_wall, "steps/s", "Celery (not durable)", wall),
    ]
    return [
        row("steps_per_second_vs_best_durable_peer", per_cpu, "steps/CPU-s", *best["cpu"]),
        row("steps_per_wall_second_vs_best_durable_peer", per_wall, "steps/s", *best["wall"]),
        *rows,
    ]


def _value(pair: tuple[str, float]) -> float:
    return pair[1]


def measure_latency(postgres: Postgres, valkey: Valkey, *, nudges: int) -> list[dict[str, Any]]:
    ours = contend(postgres, valkey, "ours", "latency", nudges)["ms"]
    rows = [row("nudge_to_step_p50_ms", statistics.median(ours), "ms"), row("nudge_to_step_p99_ms", _p99(ours), "ms")]
    for label, contender in LATENCY.items():
        peer = contend(postgres, valkey, contender, "latency", max(nudges // 3, 20))["ms"]
        rows.append(row(f"nudge_to_step_p50_ms_vs_{contender}", statistics.median(ours), "ms", label, statistics.median(peer)))
        rows.append(row(f"nudge_to_step_p99_ms_vs_{contender}", _p99(ours), "ms", label, _p99(peer)))
    return rows


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


def machine() -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    cores = Path("/proc/cpuinfo").read_text().count("processor\t")
    load = Path("/proc/loadavg").read_text().split()[0]
    return f"{model}, {cores} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load} at the start"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smoke run: figures mean little")
    parser.add_argument("--only", choices=["throughput", "latency"], help="measure one half")
    chosen = parser.parse_args()
    report: dict[str, Any] = {
        "name": "kernel",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "command": shlex.join(["python", "-m", "tests.bench.kernel", *sys.argv[1:]]),
    }
    with servers() as (postgres, valkey):
        report["rows"] = []
        if chosen.only != "latency":
            report["rows"] += measure_throughput(
                postgres, valkey, chains=30 if chosen.quick else 300, rounds=1 if chosen.quick else 3
            )
        if chosen.only != "throughput":
            report["rows"] += measure_latency(postgres, valkey, nudges=30 if chosen.quick else 400)
    print(json.dumps(report) if chosen.json else table(report))
    return 0


def table(report: dict[str, Any]) -> str:
    """The report as Markdown, for docs/reference/benchmarks.md."""
    lines = ["| metric | ours | unit | peer | peer's | ratio |", "|---|---:|---|---|---:|---:|"]
    lines += [
        f"| {row['metric']} | {row['ours']:g} | {row['unit']} | {row.get('peer', '')} | {row.get('peer_value', '')} | {row.get('ratio', '')} |"
        for row in report["rows"]
    ]
    return f"{report['date']}, {report['machine']}, `{report['command']}`:\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
