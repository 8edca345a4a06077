"""Contender: DBOS. `python -m tests.bench.kernel_dbos throughput|threads|transaction|latency|serve URL REDIS COUNT`.

`throughput`: five `@DBOS.step`s whose recorded output is the effect (less work than ours: no row of its own).
`transaction`: five transactional steps of a datasource: effect and record commit together, as ours do.
"""

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import asyncpg
import psycopg
from dbos import DBOS, DBOSClient
from dbos._datasource_postgres import PostgresAsyncDatasource
from sqlalchemy import text

from tests.bench.kernel_common import EFFECT, PARALLEL, STEPS, WARM, Clock, check_effects, nudge_one_by_one


def configure(url: str) -> None:
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "sys_db_pool_size": PARALLEL,
            "log_level": "ERROR",
            "run_admin_server": False,
            "application_version": "1",
        }
    )


@DBOS.step()
async def record(subject: str, number: int) -> int:
    return number


@DBOS.workflow()
async def five(subject: str) -> None:
    for number in range(STEPS):
        await record(subject, number)


@DBOS.step()
def record_plainly(subject: str, number: int) -> int:
    return number


@DBOS.workflow()
def five_plainly(subject: str) -> None:
    for number in range(STEPS):
        record_plainly(subject, number)


def threads(url: str, chains: int) -> None:
    """The same without asyncio, which spares DBOS a change of threads for each record."""
    configure(url)
    DBOS.launch()
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(five_plainly, [f"warm{number}" for number in range(WARM)]))
        clock = Clock()
        list(pool.map(five_plainly, [f"chain{number}" for number in range(chains)]))
        clock.report(chains * STEPS)
    DBOS.destroy()


async def in_parallel(chains: int, workflow) -> None:
    limit = asyncio.Semaphore(PARALLEL)

    async def one(number: int) -> None:
        async with limit:
            await workflow(f"{chains}-{time.time_ns()}-{number}")

    await asyncio.gather(*(one(number) for number in range(chains)))


async def throughput(url: str, chains: int) -> None:
    configure(url)
    DBOS.launch()
    await in_parallel(WARM, five)
    clock = Clock()
    await in_parallel(chains, five)
    clock.report(chains * STEPS)
    DBOS.destroy()


async def transaction(url: str, chains: int) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(EFFECT)
    await connection.close()
    configure(url)
    source = await PostgresAsyncDatasource.create(url, engine_kwargs={"pool_size": PARALLEL})
    statement = text("INSERT INTO effect (subject, step) VALUES (:subject, :step)")

    @source.transaction()
    async def effect(subject: str, number: int) -> None:
        await source.sql_session().execute(statement, {"subject": subject, "step": number})

    @DBOS.workflow()
    async def five_transactions(subject: str) -> None:
        for number in range(STEPS):
            await effect(subject, number)

    DBOS.launch()
    await in_parallel(WARM, five_transactions)
    clock = Clock()
    await in_parallel(chains, five_transactions)
    clock.report(chains * STEPS)
    await check_effects(url, chains + WARM)
    DBOS.destroy()


async def latency(url: str, count: int) -> None:
    client = DBOSClient(system_database_url=url)

    async def nudge(number: int) -> None:
        await asyncio.to_thread(client.send, "ear", number)

    connection = await asyncpg.connect(url)
    ready = "SELECT count(*) FROM dbos.workflow_status WHERE workflow_uuid = 'ear'"

    async def nudge_when_ready(number: int) -> None:
        async with asyncio.timeout(30):
            while number == -5 and not await _value(connection, ready):
                await asyncio.sleep(0.1)
        await nudge(number)

    await nudge_one_by_one(url, ["tests.bench.kernel_dbos", "serve", url, "", "0"], count, nudge_when_ready)


async def _value(connection: asyncpg.Connection, query: str) -> int:
    try:
        return await connection.fetchval(query)
    except asyncpg.PostgresError:
        return 0


def serve(url: str) -> None:
    from dbos import SetWorkflowID

    configure(url)
    connection = psycopg.connect(url, autocommit=True)

    @DBOS.step()
    def write(number: int) -> None:
        at = time.time()
        connection.execute("INSERT INTO heard (n, at) VALUES (%s, %s)", (number, at))

    @DBOS.workflow()
    def hear() -> None:
        while True:
            number = DBOS.recv(timeout_seconds=3600)
            if number is not None:
                write(number)

    DBOS.launch()
    with SetWorkflowID("ear"):
        DBOS.start_workflow(hear)
    time.sleep(3600)


if __name__ == "__main__":
    mode, url, count = sys.argv[1], sys.argv[2], int(sys.argv[4])
    if mode == "serve":
        serve(url)
    elif mode == "threads":
        threads(url, count)
    else:
        asyncio.run({"throughput": throughput, "transaction": transaction, "latency": latency}[mode](url, count))
