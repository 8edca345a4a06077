"""Contender: Bedplate's kernel. `python -m tests.bench.kernel_ours throughput|latency|serve URL REDIS COUNT`.

Each step inserts its effect and commits it together with its successor (`tx.goto`), then the next starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from datetime import timedelta

import uvloop

from controlplane import kernel
from controlplane.core.clock import SystemClock
from controlplane.core.sealing import Sealer
from controlplane.kernel.database import Database
from controlplane.kernel.program import Outcome, Program, done, step, wait
from controlplane.kernel.publish import CeleryPublisher
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.world import World
from controlplane.settings import Settings
from tests.bench.kernel_common import EFFECT, INSERT, PARALLEL, STEPS, WARM, Clock, check_effects, nudge_one_by_one

SOON = timedelta(minutes=5)


class FiveProgram(Program[str]):
    async def _effect(self, number, then) -> Outcome:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, number)
            return tx.done() if then is None else tx.goto(then)

    @step(within=SOON)
    async def one(self) -> Outcome:
        return await self._effect(1, self.two)

    @step(within=SOON)
    async def two(self) -> Outcome:
        return await self._effect(2, self.three)

    @step(within=SOON)
    async def three(self) -> Outcome:
        return await self._effect(3, self.four)

    @step(within=SOON)
    async def four(self) -> Outcome:
        return await self._effect(4, self.five)

    @step(within=SOON)
    async def five(self) -> Outcome:
        return await self._effect(5, None)

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class EarProgram(Program[str]):
    @step(within=None)
    async def hear(self) -> Outcome:
        at = time.time()
        async with self.raw_tx() as tx:
            for told in self.signals:
                if told.kind == "say":
                    await tx.conn.execute("INSERT INTO heard (n, at) VALUES ($1, $2)", told.body["n"], at)
            return tx.wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


async def throughput(url: str, runs: int) -> None:
    database = await Database.open(url, pool_size=PARALLEL)
    await database.pool.execute(EFFECT)
    world = World(database=database, hosts=None, clock=SystemClock(), settings=Settings(), sealer=Sealer(bytes(32)))
    async with Runner(world=world, registry=Registry([FiveProgram]), max_steps_in_flight=PARALLEL) as runner:
        await drive(database, runner, WARM)
        clock = Clock()
        await drive(database, runner, runs)
        clock.report(runs * STEPS)
    await check_effects(url, runs + WARM)
    await database.close()


async def drive(database: Database, runner: Runner, runs: int) -> None:
    """Start the runs, one transaction each, and run them to their ends."""
    name = f"{runs}-{time.time_ns()}"

    async def start(numbers: range) -> None:
        for number in numbers:
            async with database.pool.acquire() as connection, connection.transaction():
                await kernel.start(connection, "five", f"{name}-{number}")

    await asyncio.gather(*(start(range(part, runs, 4)) for part in range(4)))
    while await database.pool.fetchval("SELECT EXISTS (SELECT FROM run WHERE finished_at IS NULL)"):
        await runner.sweep(range(64))
        await asyncio.sleep(0.002)


async def latency(url: str, redis_url: str, count: int) -> None:
    publisher = CeleryPublisher(redis_url)
    database = await Database.open(url, pool_size=2, publisher=publisher)
    async with database.session() as session:
        await kernel.start(session, "ear", "one")

    async def nudge(number: int) -> None:
        async with database.session() as session:
            await kernel.signal(session, "ear", "one", "say", {"n": number})

    await nudge_one_by_one(url, ["tests.bench.kernel_ours", "serve", url, redis_url, "0"], count, nudge)
    publisher.close()
    await database.close()


def serve(url: str, redis_url: str) -> int:
    """A worker process as it is deployed: Celery hears, the engine runs."""
    from controlplane.worker.main import run

    logging.basicConfig(level="WARNING")
    with tempfile.TemporaryDirectory() as state:
        os.environ |= {"BEDPLATE_DATABASE__URL": url, "BEDPLATE_REDIS__URL": redis_url, "BEDPLATE_STATE_DIR": state}
        os.environ["BEDPLATE_LOG_LEVEL"] = "WARNING"
        return run(Settings(), Registry([EarProgram]))


if __name__ == "__main__":
    mode, url, redis_url, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    if mode == "serve":
        sys.exit(serve(url, redis_url))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(throughput(url, count) if mode == "throughput" else latency(url, redis_url, count))
