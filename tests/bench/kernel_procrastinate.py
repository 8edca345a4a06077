"""Contender: procrastinate. `python -m tests.bench.kernel_procrastinate throughput|latency|serve URL REDIS COUNT`.

A task inserts its effect and defers its successor, both committed before the successor starts.
"""

from __future__ import annotations

import asyncio
import sys
import time

import psycopg_pool
from procrastinate import App, PsycopgConnector

from tests.bench.kernel_common import EFFECT, PARALLEL, STEPS, WARM, Clock, check_effects, nudge_one_by_one


def make_app(url: str) -> App:
    return App(connector=PsycopgConnector(conninfo=url, min_size=2, max_size=PARALLEL))


async def throughput(url: str, chains: int) -> None:
    app = make_app(url)
    async with app.open_async(), psycopg_pool.AsyncConnectionPool(url, max_size=PARALLEL, kwargs={"autocommit": True}) as pool:
        await app.schema_manager.apply_schema_async()
        async with pool.connection() as connection:
            await connection.execute(EFFECT)
        finished = 0

        @app.task(name="step")
        async def step(subject: str, number: int) -> None:
            nonlocal finished
            async with pool.connection() as connection:
                await connection.execute("INSERT INTO effect (subject, step) VALUES (%s, %s)", (subject, number))
            if number + 1 < STEPS:
                await step.defer_async(subject=subject, number=number + 1)
            else:
                finished += 1

        worker = asyncio.create_task(app.run_worker_async(concurrency=PARALLEL, install_signal_handlers=False))

        async def drive(count: int) -> None:
            goal = finished + count

            async def start(numbers: range) -> None:
                for number in numbers:
                    await step.defer_async(subject=f"{count}-{number}", number=0)

            await asyncio.gather(*(start(range(part, count, 4)) for part in range(4)))
            while finished < goal:
                await asyncio.sleep(0.01)

        await drive(WARM)
        clock = Clock()
        await drive(chains)
        clock.report(chains * STEPS)
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    await check_effects(url, chains + WARM)


async def latency(url: str, count: int) -> None:
    app = make_app(url)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()

        async def nudge(number: int) -> None:
            await app.configure_task("hear").defer_async(n=number)

        await nudge_one_by_one(url, ["tests.bench.kernel_procrastinate", "serve", url, "", "0"], count, nudge)


async def serve(url: str) -> None:
    app = make_app(url)
    async with (
        app.open_async(),
        psycopg_pool.AsyncConnectionPool(url, min_size=1, max_size=2, kwargs={"autocommit": True}) as pool,
    ):

        @app.task(name="hear")
        async def hear(n: int) -> None:
            at = time.time()
            async with pool.connection() as connection:
                await connection.execute("INSERT INTO heard (n, at) VALUES (%s, %s)", (n, at))

        await app.run_worker_async(concurrency=PARALLEL, install_signal_handlers=False)


if __name__ == "__main__":
    mode, url, count = sys.argv[1], sys.argv[2], int(sys.argv[4])
    asyncio.run(serve(url) if mode == "serve" else {"throughput": throughput, "latency": latency}[mode](url, count))
