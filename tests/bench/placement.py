"""Placement on a simulated fleet: `python -m tests.bench.placement --json [--quick]`.

10,000 hosts and 100,000 machines as rows on PostgreSQL with fsync; each placement is a transaction of its own (`reserve`, commit).
Afterwards the hosts' sums are compared with the reservations: a double allocation is a host whose sums differ or exceed what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shlex
import sys
import time
from datetime import UTC, datetime
from typing import Any

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from controlplane.core.ids import Kind, new_id
from controlplane.models.base import Base
from controlplane.placement.explain import explain
from controlplane.placement.request import PlacementRequest
from controlplane.placement.reserve import reserve
from tests.bench.kernel import servers

GIB = 1 << 30
PLACERS = 50
REQUEST = PlacementRequest(vcpus=2, memory_bytes=4 * GIB)
HOSTS = """
INSERT INTO host (id, name, address, state, facts, facts_at, ssh_key_sealed, ssh_public_key, architecture, machine_drivers,
                  allocatable_vcpus, allocatable_memory_bytes, reserved_vcpus, reserved_memory_bytes, labels, location)
SELECT 'host_' || n, 'h' || n, 'h' || n || '.test', 'ready', '{}', now(), 'x', 'ssh-ed25519 A', 'x86_64', '{cloud_hypervisor}',
       128, 512::bigint << 30, $2 * 4, $2 * (8::bigint << 30), '{}', 'rack' || n % 100
FROM generate_series(1, $1) AS n
"""
MACHINES = """
INSERT INTO reservation (subject_id, host_id, vcpus, memory_bytes)
SELECT 'vm_' || n || '_' || m, 'host_' || n, 4, 8::bigint << 30 FROM generate_series(1, $1) AS n, generate_series(1, $2) AS m
"""
WRONG = """
SELECT count(*) FROM host LEFT JOIN
    (SELECT host_id, sum(vcpus) AS vcpus, sum(memory_bytes) AS memory_bytes FROM reservation GROUP BY host_id) AS held
    ON held.host_id = host.id
WHERE coalesce(held.vcpus, 0) <> reserved_vcpus OR coalesce(held.memory_bytes, 0) <> reserved_memory_bytes
   OR reserved_vcpus > allocatable_vcpus OR reserved_memory_bytes > allocatable_memory_bytes
"""


async def measure(url: str, *, hosts: int, per_host: int, seconds: float) -> list[dict[str, Any]]:
    """All rows of the table."""
    engine = create_async_engine(url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=PLACERS, max_overflow=0)
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    plain = await asyncpg.connect(url)
    try:
        await plain.execute(HOSTS, hosts, per_host)
        await plain.execute(MACHINES, hosts, per_host)
        await plain.execute("VACUUM ANALYZE")
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        alone, _ = await place(sessions, 1, seconds)
        crowd, took = await place(sessions, PLACERS, seconds)
        explained = [await explained_in(sessions) for _ in range(10)]
        wrong = await plain.fetchval(WRONG)
    finally:
        await plain.close()
        await engine.dispose()
    return [
        {"metric": "p50_ms", "ours": quantile(alone, 0.5), "unit": "ms"},
        {"metric": "p99_ms", "ours": quantile(alone, 0.99), "unit": "ms"},
        {"metric": f"placements_per_second_{PLACERS}_placers", "ours": round(len(crowd) / took, 1), "unit": "1/s"},
        {"metric": f"p99_ms_{PLACERS}_placers", "ours": quantile(crowd, 0.99), "unit": "ms"},
        {"metric": "explain_p50_ms", "ours": quantile(explained, 0.5), "unit": "ms"},
        {"metric": "double_allocations", "ours": wrong, "unit": "hosts"},
    ]


async def place(sessions: async_sessionmaker[AsyncSession], placers: int, seconds: float) -> tuple[list[float], float]:
    """The seconds of each placement of so many placers in a closed loop, and how long all took."""
    began = time.monotonic()
    found: list[float] = []

    async def placer() -> None:
        while time.monotonic() - began < seconds:
            start = time.monotonic()
            async with sessions.begin() as session:
                assert await reserve(session, new_id(Kind.VM), REQUEST) is not None
            found.append(time.monotonic() - start)

    async with asyncio.TaskGroup() as group:
        for _ in range(placers):
            group.create_task(placer())
    return found, time.monotonic() - began


async def explained_in(sessions: async_sessionmaker[AsyncSession]) -> float:
    start = time.monotonic()
    async with sessions() as session:
        await explain(session, PlacementRequest(vcpus=500, memory_bytes=4 * GIB))
    return time.monotonic() - start


def quantile(seconds: list[float], share: float) -> float:
    return round(sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)] * 1000, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="200 hosts, for a few seconds")
    given = parser.parse_args()
    hosts, seconds = (200, 2.0) if given.quick else (10_000, 15.0)
    with servers() as (postgres, _):
        rows = asyncio.run(measure(postgres.url("postgres"), hosts=hosts, per_host=10, seconds=seconds))
    report = {
        "name": "placement",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, {hosts} hosts, {hosts * 10} machines",
        "command": shlex.join(["python", "-m", "tests.bench.placement", *sys.argv[1:]]),
        "rows": rows,
    }
    words = "\n".join(f"{row['metric']:>36} {row['ours']:>10} {row['unit']}" for row in rows)
    print(json.dumps(report) if given.json else words)


if __name__ == "__main__":
    main()
