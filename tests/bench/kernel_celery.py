"""Contender: plain Celery on Redis. `python -m tests.bench.kernel_celery throughput|latency|serve URL REDIS COUNT`.

Not durable: a task inserts its effect and sends its successor; what Redis or the worker loses is lost. For comparison only.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import psycopg_pool
from celery import Celery, signals

from controlplane.kernel.publish import broker_url
from tests.bench.kernel_common import EFFECT, PARALLEL, STEPS, WARM, Clock, check_effects, nudge_one_by_one


def make_app(redis_url: str) -> Celery:
    app = Celery("bench", broker=broker_url(redis_url))
    app.conf.update(
        task_ignore_result=True,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        worker_redirect_stdouts=False,
    )
    return app


def run_worker(app: Celery) -> None:
    app.Worker(
        pool="threads",
        concurrency=PARALLEL,
        loglevel="ERROR",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    ).start()


def throughput(url: str, redis_url: str, chains: int) -> None:
    app = make_app(redis_url)
    pool = psycopg_pool.ConnectionPool(url, max_size=PARALLEL, kwargs={"autocommit": True}, open=True)
    with pool.connection() as connection:
        connection.execute(EFFECT)
    finished = threading.Semaphore(0)

    @app.task(name="step")
    def step(subject: str, number: int) -> None:
        with pool.connection() as connection:
            connection.execute("INSERT INTO effect (subject, step) VALUES (%s, %s)", (subject, number))
        if number + 1 < STEPS:
            step.delay(subject, number + 1)
        else:
            finished.release()

    def drive(count: int) -> None:
        for number in range(count):
            step.delay(f"{count}-{number}", 0)
        for _ in range(count):
            finished.acquire()

    @signals.worker_ready.connect(weak=False)
    def begin(sender, **_) -> None:
        def measure() -> None:
            drive(WARM)
            clock = Clock()
            drive(chains)
            clock.report(chains * STEPS)
            asyncio.run(check_effects(url, chains + WARM))
            sender.controller.stop()  # the worker leaves its loop

        threading.Thread(target=measure, daemon=True).start()

    run_worker(app)
    pool.close()


async def latency(url: str, redis_url: str, count: int) -> None:
    app = make_app(redis_url)

    async def nudge(number: int) -> None:
        app.send_task("hear", (number,))

    await nudge_one_by_one(url, ["tests.bench.kernel_celery", "serve", url, redis_url, "0"], count, nudge)


def serve(url: str, redis_url: str) -> None:
    app = make_app(redis_url)
    pool = psycopg_pool.ConnectionPool(url, min_size=1, max_size=2, kwargs={"autocommit": True}, open=True)

    @app.task(name="hear")
    def hear(number: int) -> None:
        at = time.time()
        with pool.connection() as connection:
            connection.execute("INSERT INTO heard (n, at) VALUES (%s, %s)", (number, at))

    run_worker(app)


if __name__ == "__main__":
    mode, url, redis_url, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    if mode == "serve":
        serve(url, redis_url)
    elif mode == "throughput":
        throughput(url, redis_url, count)
    else:
        asyncio.run(latency(url, redis_url, count))
