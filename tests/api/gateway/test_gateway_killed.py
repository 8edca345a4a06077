"""`kill -9` of gateway and of PostgreSQL in the middle of many streams: nothing counts twice, at most a second is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from controlplane.embedded.postgres import Postgres
from controlplane.models.all import metadata
from tests.api.gateway.conftest import Fleet
from tests.api.gateway.mock_engine import DONE, MockEngine, delta, usage_event
from tests.api.gateway.talk import STREAM
from tests.api.gateway.test_gateway_process import Process

PACE_SECONDS = 0.33


class KillablePostgres(Postgres):
    """A durable server that may be killed, with all its processes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory=directory)
        object.__setattr__(self, "processes", [])

    def run(self) -> None:
        self.processes.append(self.start())

    async def kill(self) -> None:
        pid = self.pid()
        assert pid is not None
        for victim in (pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        await asyncio.to_thread(self.reap)

    def reap(self) -> None:
        for process in self.processes:
            process.wait(timeout=20)


@pytest.fixture
async def own_postgres() -> AsyncIterator[KillablePostgres]:
    with tempfile.TemporaryDirectory(prefix="bedplate-kill-pg-") as name:
        Path(name).chmod(0o755)
        server = KillablePostgres(Path(name))
        server.prepare()
        server.run()
        try:
            admin = await asyncpg.connect(server.url("postgres"))
            await admin.execute("CREATE DATABASE bedplate")
            await admin.close()
            engine = create_async_engine(server.url().replace("postgresql://", "postgresql+asyncpg://"))
            async with engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
            await engine.dispose()
            yield server
        finally:
            server.stop()
            server.reap()


class Streams:
    """Clients of streams, and what they received of each by its request id."""

    def __init__(self, url: str, key: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._key = key
        self.received: dict[str, int] = {}

    async def one(self, http: aiohttp.ClientSession, number: int, kind: str) -> None:
        name = f"{kind}-{number}"
        headers = {"authorization": f"Bearer {self._key}", "x-request-id": name, "x-vendor": kind}
        self.received[name] = 0
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(self._url, json=STREAM, headers=headers) as reply:
                assert reply.status == 200
                async for line in reply.content:
                    self.received[name] += line.startswith(b"data: {")


async def _answer(seen, peer) -> None:
    """`short` streams end after three tokens, `long` ones never."""
    await peer.open_stream()
    if seen.headers["x-vendor"] == "short":
        await peer.events(delta("a"), delta("b"), delta("c"), usage_event(), DONE)
        return await peer.end()
    for _ in range(1000):
        await peer.events(delta("x"))
        await asyncio.sleep(PACE_SECONDS)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.thorough)])
async def test_gateway_and_postgres_killed(own_postgres: KillablePostgres, engine: MockEngine, tmp_path, count: int) -> None:
    """Long, because what happens to streams before, between and after the two deaths is one account."""
    fleet = Fleet(own_postgres.url())
    fleet.project_id = await fleet.project()
    key = await fleet.key(token_budget=10**10)
    await fleet.model("chat", engine.url)
    engine.answer = _answer
    process = Process(tmp_path, own_postgres.url())
    await process.start()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            streams = Streams(process.url, key)
            tasks = [asyncio.ensure_future(streams.one(http, number, "long")) for number in range(count)]
            await asyncio.gather(*(streams.one(http, number, "short") for number in range(count // 5)))
            await _until(lambda: all(streams.received.values()))
            await own_postgres.kill()
            await asyncio.gather(*(streams.one(http, number, "short") for number in range(count // 5, count // 2)))
            await asyncio.sleep(1.5)  # tokens flow while nobody can write them down but the journal
            await process.stop(signal.SIGKILL)
            await asyncio.gather(*tasks)
        own_postgres.run()
        await process.start()
        await _check(fleet, streams.received)
    finally:
        await process.stop(signal.SIGKILL)


async def _until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)


async def _check(fleet: Fleet, received: dict[str, int]) -> None:
    records = await fleet.usage(count=len(received))
    async with asyncio.timeout(10):
        async with fleet.connection() as connection:
            while await connection.fetchval("SELECT count(*) FROM budget_hold"):
                await asyncio.sleep(0.05)
    records = await fleet.usage(count=len(received))
    assert sorted(record["request_id"] for record in records) == sorted(received), "each once"
    for record in records:
        settled, seen = record["completion_tokens"], received[record["request_id"]]
        if record["request_id"].startswith("short"):
            assert (record["outcome"], settled, record["is_estimated"]) == ("completed", 3, False)
        else:
            assert (record["outcome"], record["is_estimated"]) == ("gateway_died", True)
            assert seen - 1.0 / PACE_SECONDS - 1 <= settled <= seen + 1, (record["request_id"], settled, seen)
    async with fleet.connection() as connection:
        hours = await connection.fetchrow(
            "SELECT sum(requests) AS r, sum(completion_tokens) AS c, sum(prompt_tokens + completion_tokens) AS t"
            " FROM usage_hour"
        )
        used = await connection.fetchval("SELECT sum(tokens) FROM budget_use")
    assert (hours["r"], hours["c"]) == (len(records), sum(record["completion_tokens"] for record in records))
    assert used == hours["t"]
