"""What the gateway costs: `python -m tests.bench.gateway --json [--quick]`.

One mock engine, one gateway with keys, limits and metering on, clients of our own; CPU from /proc/<pid>/stat, which repeats on
a busy machine where wall-clock figures do not. Peers that are on PATH are run on the same engine in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import platform
import shutil
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

from controlplane.core.ids import Kind, new_id
from controlplane.embedded.postgres import Postgres
from controlplane.models.all import metadata
from controlplane.embedded.valkey import Valkey
from tests.bench.gateway_peers import STARTS, Peer, peer, process
from tests.bench.gateway_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
KEY = "bpk_benchmark"
PEERS_WHEN_QUICK = ("nginx",)
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


async def lay_rows(url: str, upstream: str) -> None:
    """A project with a key and a route to the mock engine. Long, because each row names its columns."""
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"))
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    project, endpoint, route = new_id(Kind.PROJECT), new_id(Kind.ENDPOINT), new_id(Kind.ROUTE)
    connection = await asyncpg.connect(url)
    spec = json.dumps({"served_model_id": "bench"})
    for statement, *arguments in (
        ("INSERT INTO project (id, name) VALUES ($1, 'bench')", project),
        (
            "INSERT INTO key (id, project_id, name, secret_sha256, hint, requests_per_minute, tokens_per_minute)"
            " VALUES ($1, $2, 'bench', $3, 'mark', 1000000000, 1000000000000)",
            new_id(Kind.KEY),
            project,
            hashlib.sha256(KEY.encode()).digest(),
        ),
        (
            "INSERT INTO endpoint (id, project_id, name, model, spec, replicas, vcpus, memory_bytes)"
            " VALUES ($1, $2, 'bench', 'bench', $3, 1, 1, 1)",
            endpoint,
            project,
            spec,
        ),
        (
            "INSERT INTO endpoint_revision (endpoint_id, number, model, spec, vcpus, memory_bytes)"
            " VALUES ($1, 1, 'bench', $2, 1, 1)",
            endpoint,
            spec,
        ),
        (
            "INSERT INTO replica (id, project_id, endpoint_id, state, base_url, ready_at) VALUES ($1, $2, $3, 'ready', $4, now())",
            new_id(Kind.REPLICA),
            project,
            endpoint,
            upstream,
        ),
        ("INSERT INTO route (id, project_id, name) VALUES ($1, $2, 'bench')", route, project),
        ("INSERT INTO route_target (route_id, endpoint_id) VALUES ($1, $2)", route, endpoint),
    ):
        await connection.execute(statement, *arguments)
    await connection.close()


@contextlib.contextmanager
def stage() -> Iterator[tuple[str, str, int]]:
    """URL of the engine, URL of the gateway and the gateway's pid."""
    directory = Path(tempfile.mkdtemp(prefix="bedplate-bench-"))
    directory.chmod(0o755)
    postgres = Postgres(directory=directory / "pg")
    postgres.prepare()
    server = postgres.start()
    valkey = Valkey(directory=directory / "valkey")
    valkey.prepare()
    redis = subprocess.Popen(valkey.argv(), env=valkey.environment(), stdout=subprocess.DEVNULL)
    engine_port, gateway_port = free_port(), free_port()
    engine_url, gateway_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{gateway_port}"
    environment = {
        "BEDPLATE_DATABASE__URL": postgres.url("bedplate"),
        "BEDPLATE_STATE_DIR": str(directory / "state"),
        "BEDPLATE_CONFIG": str(directory / "none.toml"),
        "BEDPLATE_GATEWAY__LISTEN": f"127.0.0.1:{gateway_port}",
        "BEDPLATE_REDIS__URL": valkey.url,
    }
    try:
        asyncio.run(make_database(postgres.url("postgres")))
        asyncio.run(lay_rows(postgres.url("bedplate"), engine_url))
        with (
            process([sys.executable, "-m", "tests.bench.gateway_upstream", str(engine_port)], engine_port),
            process([sys.executable, "-m", "controlplane.gateway"], gateway_port, **environment) as pid,
        ):
            yield engine_url, gateway_url, pid
    finally:
        redis.kill()
        redis.wait()
        postgres.stop()
        if server is not None:
            server.wait()
        shutil.rmtree(directory, ignore_errors=True)


async def make_database(url: str) -> None:
    admin = await asyncpg.connect(url)
    await admin.execute("CREATE DATABASE bedplate")
    await admin.close()


def load(url: str, *words: object) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.bench.gateway_load", url, KEY, *map(str, words)]
    done = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=600)
    return json.loads(done.stdout)


def cost(pid: int, url: str, unit: str, *words: object, rounds: int) -> float:
    """CPU microseconds a unit, the best of the rounds."""
    found = []
    for _ in range(rounds):
        before = cpu_seconds(pid)
        count = load(url, *words)[unit]
        found.append(1e6 * (cpu_seconds(pid) - before) / count)
    return min(found)


def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    """Ours, then each peer, on the same engine; ratios below 1 are ours to be glad of."""
    seconds, rounds, streams = (1, 1, 20) if is_quick else (6, 3, 100)
    rows: list[dict[str, Any]] = []
    with stage() as (engine, gateway, pid):
        direct = load(engine, "open", 64, seconds, 200)
        load(gateway, "closed", 4, 0.5)
        per_request = cost(pid, gateway, "requests", "closed", 16, seconds, rounds=rounds)
        per_chunk = cost(pid, gateway, "chunks", "streams", streams, 100, rounds=rounds)
        through = load(gateway, "open", 64, seconds, 200)
        rows.append(row("cpu_us_per_request", per_request, "µs"))
        rows.append(row("cpu_us_per_paced_chunk", per_chunk, "µs"))
        rows += [row(f"added_{name}", through[name] - direct[name], "ms") for name in ("p50_ms", "p99_ms")]
        rows.append(row("rss_mib", rss_mib(pid), "MiB"))
        ours = {"request": per_request, "chunk": per_chunk, "rss": rss_mib(pid)}
        ours |= {name: through[name] - direct[name] for name in ("p50_ms", "p99_ms")}
        for name in PEERS_WHEN_QUICK if is_quick else STARTS:
            with peer(name, engine, KEY) as other:
                if other is not None:
                    rows += beside(other, ours, (seconds, rounds, streams), direct)
    return rows


def beside(other: Peer, ours: dict[str, float], amount: tuple[int, int, int], direct: dict[str, Any]) -> list[dict[str, Any]]:
    """The same figures of a peer. Added latency is left out for one that cannot do 200 requests a second."""
    seconds, rounds, streams = amount
    name = other.name.replace("-", "_")
    load(other.url, "closed", 4, 0.5)
    request = cost(other.pid, other.url, "requests", "closed", 16, seconds, rounds=rounds)
    chunk = cost(other.pid, other.url, "chunks", "streams", streams, 100, rounds=rounds)
    rows = [
        row(f"cpu_per_request_vs_{name}", ours["request"], "µs", other.name, request),
        row(f"cpu_per_paced_chunk_vs_{name}", ours["chunk"], "µs", other.name, chunk),
        row(f"rss_vs_{name}", ours["rss"], "MiB", other.name, rss_mib(other.pid)),
    ]
    if request < 1e6 / 400:
        through = load(other.url, "open", 64, seconds, 200)
        for percentile in ("p50_ms", "p99_ms"):
            added = through[percentile] - direct[percentile]
            rows.append(row(f"added_{percentile}_vs_{name}", ours[percentile], "ms", other.name, added))
    return rows


def row(metric: str, ours: float, unit: str, peer: str | None = None, peer_value: float | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"metric": metric, "ours": round(ours, 3), "unit": unit}
    if peer is not None and peer_value:
        found |= {"peer": peer, "peer_value": round(peer_value, 3), "ratio": round(ours / peer_value, 3)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures say little")
    chosen = parser.parse_args()
    begun = time.monotonic()
    rows = measure(is_quick=chosen.quick)
    if not chosen.json:
        for item in rows:
            beside = f"   {item['peer']}: {item['peer_value']} (ratio {item['ratio']})" if "peer" in item else ""
            print(f"{item['metric']:<28} {item['ours']:>10} {item['unit']}{beside}")
        print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)
        return 0
    result = {
        "name": "gateway",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "command": "python -m tests.bench.gateway --json" + (" --quick" if chosen.quick else ""),
        "rows": rows,
    }
    print(json.dumps(result, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
