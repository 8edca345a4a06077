"""Real worker processes: messages make them quick; kill -9, a flushed or dead Redis make them late, never wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from sqlalchemy.exc import DBAPIError

from controlplane import kernel
from controlplane.embedded.valkey import Valkey
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher, broker_url, publishing_app
from controlplane.kernel.shard import ShardKeeper
from controlplane.worker.beat import beat, is_anyone_present
from tests.db import kernel_toys as toys
from tests.valkey import valkey_server

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 45.0


async def until(condition: Callable[[], Awaitable[object]], seconds: float = DEADLINE) -> float:
    """Wait until it holds; returns how long that took."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture
def valkey() -> Iterator[Valkey]:
    with valkey_server() as server:
        asyncio.run(server.start())
        yield server.valkey


@dataclass
class Workers:
    """Starts worker processes of the toy programs and cleans them up."""

    environment: dict[str, str]
    log: Path
    processes: list[subprocess.Popen[bytes]]

    def start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.db.kernel_toys"], cwd=ROOT, env=self.environment, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process


@contextmanager
def worker_processes(database_url: str, directory: Path, redis_url: str) -> Iterator[Workers]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BEDPLATE_")}
    environment |= {
        "BEDPLATE_DATABASE__URL": database_url,
        "BEDPLATE_REDIS__URL": redis_url,
        "BEDPLATE_STATE_DIR": str(directory),
        "BEDPLATE_CONFIG": "/nonexistent",
    }
    workers = Workers(environment, directory / "worker.log", [])
    try:
        yield workers
    finally:
        for process in workers.processes:
            process.kill()
            process.wait()


@pytest.fixture
async def publishing(database_url: str, valkey: Valkey) -> AsyncIterator[Database]:
    """A database handle as the API has it: what it nudges goes to Redis."""
    publisher = CeleryPublisher(valkey.url)
    database = await Database.open(database_url, pool_size=5, publisher=publisher)
    await toys.make_table(database.pool)
    yield database
    publisher.close()
    await database.close()


def are_finished(database: Database, count: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        query = "SELECT count(*) FROM run WHERE finished_at IS NOT NULL AND program IN ('tree', 'leaf', 'sleeper')"
        return await database.pool.fetchval(query) == count

    return look


async def all_shards_are_held(database: Database) -> bool:
    return await database.pool.fetchval("SELECT count(*) FROM shard WHERE lease_until > now()") == 64


async def test_messages_flush_and_loss_of_redis(
    database_url: str, publishing: Database, valkey: Valkey, tmp_path: Path
) -> None:
    """Long, because one worker must live through all of it."""
    database = publishing
    with worker_processes(database_url, tmp_path, valkey.url) as workers:
        worker = workers.start()
        await until(lambda: all_shards_are_held(database))
        async with database.session() as session:
            await kernel.start(session, "echo", "e")
        with redis.Redis(unix_socket_path=str(valkey.socket)) as client:

            async def say(number: int) -> float:
                async with database.session() as session:
                    await kernel.signal(session, "echo", "e", "say", {"n": number})
                heard = "SELECT count(*) FROM effect WHERE step = $1"
                return await until(lambda: database.pool.fetchval(heard, f"heard {number}"))

            await until(lambda: asyncio.to_thread(client.client_list))  # Celery listens by now or soon; the next line waits
            await say(-1)
            times = [await say(number) for number in range(20)]
            assert statistics.median(times) < 0.3, "the sweep alone would take half a second"

            client.flushall()
            async with database.session() as session:
                for number in range(4):
                    await kernel.start(session, "tree", f"flushed{number}")
            client.flushall()
            await until(are_finished(database, 16))
            assert statistics.median([await say(100 + number) for number in range(8)]) < 0.3, "messages go on after a flush"

            client.shutdown(nosave=True)
        async with database.session() as session:
            for number in range(4):
                await kernel.start(session, "tree", f"down{number}")
        await until(are_finished(database, 32))
        assert statistics.median([await say(200 + number) for number in range(8)]) < 0.5, "NOTIFY is the way out"
        assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0, workers.log.read_text()[-3000:]
    assert await database.pool.fetchval("SELECT count(*) FROM shard WHERE worker IS NOT NULL") == 0
    assert await database.pool.fetchval("SELECT count(*) FROM run WHERE lease IS NOT NULL") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kill_9_loses_and_doubles_nothing(
    database_url: str, publishing: Database, valkey: Valkey, tmp_path: Path
) -> None:
    """Workers die at any point of 48 runs; exact effects are there once, and what the dead held goes on."""
    database = publishing
    with worker_processes(database_url, tmp_path, valkey.url) as workers:
        victims = [workers.start(), workers.start()]
        await until(lambda: all_shards_are_held(database))
        async with database.session() as session:
            await kernel.start(session, "sleeper", "s")
            for number in range(12):
                await kernel.start(session, "tree", f"t{number}")
        effects = "SELECT count(*) FROM effect WHERE step <> 'tick'"
        for victim, least in zip(victims, (20, 80), strict=True):
            await until(lambda least=least: database.pool.fetchval(f"SELECT ({effects}) >= {least}"))
            victim.kill()
            victim.wait()
            workers.start()
        await database.pool.execute("INSERT INTO effect (subject, step, is_exact) VALUES ('s', 'go', false)")
        took = await until(are_finished(database, 49), seconds=90)
        assert took < 45, f"two takeovers of 15 s and the rest of the work took {took:.1f} s"
    exact = await database.pool.fetch("SELECT subject, step, count(*) AS n FROM effect WHERE is_exact GROUP BY 1, 2")
    assert len(exact) == 12 + 36 * 5
    assert {row["n"] for row in exact} == {1}
    assert await database.pool.fetchval("SELECT count(DISTINCT subject) FROM effect WHERE step = 'loose'") == 36
    assert await database.pool.fetchval("SELECT count(*) FROM signal JOIN run ON run.id = run_id WHERE program <> 'tick'") == 0


async def test_without_redis_sweep_and_reconcilers_go_on(database: Database, database_url: str, tmp_path: Path) -> None:
    await toys.make_table(database.pool)
    with worker_processes(database_url, tmp_path, "") as workers:
        worker = workers.start()
        async with database.session() as session:
            await kernel.start(session, "tree", "alone")
        await until(are_finished(database, 4))
        await until(lambda: database.pool.fetchval("SELECT count(*) > 5 FROM effect WHERE step = 'tick'"))
        assert await database.pool.fetchval("SELECT count(*) FROM run WHERE program = 'tick'") == 1

        cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = current_database() AND pid <> $1"
        async with database.pool.acquire() as connection:
            assert await connection.fetchval(cut, connection.get_server_pid()) > 2

        async def start() -> bool:
            """False while this process has not yet read that its own connection is gone too."""
            try:
                async with database.session() as session:
                    await kernel.start(session, "tree", "after-the-cut")
            except DBAPIError:
                return False
            return True

        await until(start, 5)
        await until(are_finished(database, 8))
        assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0


async def test_beat_sends_when_somebody_hears(database: Database, database_url: str, valkey: Valkey) -> None:
    assert not await is_anyone_present(database_url)
    await ShardKeeper(database, "w").tick()
    assert await is_anyone_present(database_url)
    app = publishing_app(valkey.url)
    assert await asyncio.to_thread(beat, app, ["tick"]) == 65
    with redis.Redis(unix_socket_path=str(valkey.socket)) as client:
        assert client.llen("bedplate.shard.63") == 1
        assert client.llen("bedplate") == 1
        client.shutdown(nosave=True)
    assert await asyncio.to_thread(beat, app, ["tick"]) == 0
    app.close()


def test_broker_url() -> None:
    assert broker_url("unix:///run/vk.sock?db=2") == "redis+socket:///run/vk.sock?virtual_host=2"
    assert broker_url("unix:///run/vk.sock") == "redis+socket:///run/vk.sock?virtual_host=0"
    assert broker_url("redis://h:6379/1") == "redis://h:6379/1"
