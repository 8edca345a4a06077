"""What the contenders of the kernel benchmark share: measuring CPU and wall, and nudging one at a time.

A throughput run prints {"steps", "cpu_s", "wall_s"}; a latency run prints {"ms": […]}, one value a nudge.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import asyncpg

STEPS = 5  # of one chain
PARALLEL = 16  # chains at work at a time, and connections
WARM = 20  # chains before the clock starts
EFFECT = "CREATE TABLE IF NOT EXISTS effect (subject text NOT NULL, step int NOT NULL)"
INSERT = "INSERT INTO effect (subject, step) VALUES ($1, $2)"
HEARD = "CREATE TABLE IF NOT EXISTS heard (n int NOT NULL, at float8 NOT NULL)"


class Clock:
    """CPU seconds (user and system, all threads) and wall seconds of this process since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = _cpu(), time.perf_counter()

    def report(self, steps: int) -> None:
        print(json.dumps({"steps": steps, "cpu_s": _cpu() - self._cpu, "wall_s": time.perf_counter() - self._wall}), flush=True)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def check_effects(url: str, chains: int) -> None:
    connection = await asyncpg.connect(url)
    found = await connection.fetchval("SELECT count(DISTINCT (subject, step)) FROM effect")
    await connection.close()
    assert found == chains * STEPS, f"{found} effects, not {chains * STEPS}"


async def nudge_one_by_one(url: str, serve: list[str], count: int, nudge: Callable[[int], Awaitable[None]]) -> None:
    """Start the server process, nudge it `count` times with a pause between, print milliseconds from nudge to step start."""
    connection = await asyncpg.connect(url)
    await connection.execute(HEARD)
    server = subprocess.Popen([sys.executable, "-m", *serve], stdout=sys.stderr)
    try:
        sent: dict[int, float] = {}
        for number in range(-5, count):
            sent[number] = time.time()
            await nudge(number)
            async with asyncio.timeout(60):
                while not await connection.fetchval("SELECT count(*) FROM heard WHERE n = $1", number):
                    await asyncio.sleep(0.02)
            await asyncio.sleep(random.uniform(0.005, 0.03))
        heard = dict(await connection.fetch("SELECT n, min(at) FROM heard GROUP BY n"))
        print(json.dumps({"ms": [(heard[number] - sent[number]) * 1000 for number in range(count)]}), flush=True)
    finally:
        server.kill()
        server.wait()
        await connection.close()
