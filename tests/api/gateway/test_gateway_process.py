"""The gateway as a process: killed, stopped, without its database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest

from tests.api.gateway.mock_engine import DONE, MockEngine, delta, usage_event

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


@dataclass
class Process:
    """One `python -m controlplane.gateway`."""

    state: Path
    database_url: str
    child: asyncio.subprocess.Process | None = None
    url: str = ""
    lines: list[str] = field(default_factory=list)

    async def start(self) -> None:
        environment = {
            **os.environ,
            "BEDPLATE_STATE_DIR": str(self.state),
            "BEDPLATE_CONFIG": str(self.state / "none.toml"),
            "BEDPLATE_DATABASE__URL": self.database_url,
            "BEDPLATE_GATEWAY__LISTEN": "127.0.0.1:0",
        }
        argv = [sys.executable, "-m", "controlplane.gateway"]
        self.child = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(30):
            while line := (await self.child.stderr.readline()).decode():
                self.lines.append(line)
                if found := re.search(r"listening on (\S+)", line):
                    self.url = found[1]
                    return
        raise AssertionError("".join(self.lines))

    async def stop(self, number: int) -> int:
        if self.child is None or self.child.returncode is not None:
            return 0
        self.child.send_signal(number)
        async with asyncio.timeout(40):
            self.lines += (await self.child.stderr.read()).decode().splitlines(keepends=True)
            return await self.child.wait()


class DatabaseDoor:
    """A socket in front of PostgreSQL that can be shut."""

    def __init__(self, url: str, directory: Path) -> None:
        parts = urlsplit(url)
        self._real = f"{parse_qs(parts.query)['host'][0]}/.s.PGSQL.5432"
        self._path = directory / ".s.PGSQL.5432"
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}?host={directory}"
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path)

    async def shut(self) -> None:
        if self._server is None:
            return
        self._server.close()
        self._server = None
        self._path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        inner_reader, inner_writer = await asyncio.open_unix_connection(self._real)
        try:
            await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for side in (writer, inner_writer):
                side.transport.abort()
            self._tasks.discard(task)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.fixture
async def process(tmp_path, database_url) -> AsyncIterator[Process]:
    process = Process(tmp_path, database_url)
    yield process
    await process.stop(signal.SIGKILL)


async def ask(http: aiohttp.ClientSession, process: Process, key: str, body: dict = CHAT) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"}
    async with http.post(f"{process.url}/v1/chat/completions", json=body, headers=headers) as reply:
        return reply.status, await reply.read()


async def test_killed_in_the_middle_of_streams(process, fleet, engine: MockEngine, http) -> None:
    """What was answered in full is counted in full; what was cut settles at its last second; nothing counts twice.

    Long, because one kill cuts all kinds of streams at once.
    """
    key = await fleet.key()
    await fleet.model("chat", engine.url)

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        if seen.headers["x-vendor"] == "short":
            await peer.events(delta("a"), delta("b"), usage_event(), DONE)
            return await peer.end()
        for _ in range(1000):
            await peer.events(delta("x"))
            await asyncio.sleep(0.05)
        return None

    engine.answer = answer
    await process.start()
    headers = {"authorization": f"Bearer {key}"}
    url = f"{process.url}/v1/chat/completions"
    received = 0

    async def long_stream() -> int:
        count = 0
        with contextlib.suppress(aiohttp.ClientError):
            async with http.post(url, json=STREAM, headers={**headers, "x-vendor": "long"}) as reply:
                async for line in reply.content:
                    count += line.startswith(b"data: ")
        return count

    async def short_stream() -> None:
        async with http.post(url, json=STREAM, headers={**headers, "x-vendor": "short"}) as reply:
            assert (await reply.read()).endswith(DONE)

    streams = [asyncio.ensure_future(long_stream()) for _ in range(20)]
    await asyncio.sleep(1.5)
    await asyncio.gather(*(short_stream() for _ in range(50)))
    await process.stop(signal.SIGKILL)
    received = [await stream for stream in streams]
    await process.start()
    records = await fleet.usage(count=70)
    await asyncio.sleep(1.2)
    records = await fleet.usage(count=70)
    assert len(records) == 70
    closed = [record for record in records if record["outcome"] == "completed"]
    settled = [record for record in records if record["outcome"] == "gateway_died"]
    assert (len(closed), len(settled)) == (50, 20)
    assert sum(record["completion_tokens"] for record in closed) == 150
    assert all(record["is_estimated"] for record in settled)
    assert 0 < sum(record["completion_tokens"] for record in settled) <= sum(received)
    assert max(received) - min(record["completion_tokens"] for record in settled) <= 40, "about a second of tokens"
    async with fleet.connection() as connection:
        hours = await connection.fetchrow("SELECT sum(requests) AS requests, sum(completion_tokens) AS tokens FROM usage_hour")
    assert hours["requests"] == 70
    assert hours["tokens"] == sum(record["completion_tokens"] for record in records)


async def test_stopped_in_good_order(process, fleet, engine, http) -> None:
    """SIGTERM: an open stream ends whole, its record lands, the exit code is 0."""
    key = await fleet.key()
    await fleet.model("chat", engine.url)

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        for _ in range(10):
            await peer.events(delta("x"))
            await asyncio.sleep(0.1)
        await peer.events(usage_event(), DONE)
        await peer.end()

    engine.answer = answer
    await process.start()
    asking = asyncio.ensure_future(ask(http, process, key, STREAM))
    while not engine.seen:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert await process.stop(signal.SIGTERM) == 0
    status, body = await asking
    assert status == 200
    assert body.endswith(DONE)
    assert [record["outcome"] for record in await fleet.usage()] == ["completed"]
    assert not [line for line in process.lines if "Traceback" in line]


async def test_database_away(process, fleet, engine, http, database_url, tmp_path) -> None:
    """Known keys keep working, unknown ones are neither good nor bad, usage waits, and everything recovers by itself."""
    door = DatabaseDoor(database_url, tmp_path)
    await door.open()
    try:
        key = await fleet.key()
        await fleet.model("chat", engine.url)
        process.database_url = door.url
        await process.start()
        assert (await ask(http, process, key))[0] == 200
        await door.shut()
        await _until_health(http, process, "away")
        assert (await ask(http, process, key))[0] == 200
        fresh = await fleet.key()
        status, body = await ask(http, process, fresh)
        assert (status, b"key_check_unavailable" in body) == (503, True)
        assert (await ask(http, process, "nonsense"))[0] == 401
        await door.open()
        await _until_health(http, process, "up")
        assert (await ask(http, process, fresh))[0] == 200
        assert (await ask(http, process, "bpk_unknown"))[0] == 401
        assert len(await fleet.usage(count=3)) == 3
    finally:
        await door.shut()


async def test_starts_without_its_database(process, fleet, engine, http, database_url, tmp_path) -> None:
    door = DatabaseDoor(database_url, tmp_path)
    process.database_url = door.url
    key = await fleet.key()
    await fleet.model("chat", engine.url)
    await process.start()
    assert (await ask(http, process, key))[0] == 503
    await door.open()
    try:
        await _until_health(http, process, "up")
        assert (await ask(http, process, key))[0] == 200
        await process.stop(signal.SIGTERM)
    finally:
        await door.shut()


async def test_plain_http_is_for_loopback(process) -> None:
    argv = [sys.executable, "-m", "controlplane.gateway"]
    environment = {**os.environ, "BEDPLATE_DATABASE__URL": "postgresql://x", "BEDPLATE_GATEWAY__LISTEN": "0.0.0.0:0"}
    environment["BEDPLATE_STATE_DIR"] = str(process.state)
    child = await asyncio.create_subprocess_exec(*argv, env=environment, stderr=asyncio.subprocess.PIPE)
    _, said = await child.communicate()
    assert child.returncode == 1
    assert b"BEDPLATE_INSECURE_HTTP" in said


async def _until_health(http: aiohttp.ClientSession, process: Process, database: str) -> None:
    async with asyncio.timeout(15):
        while True:
            async with http.get(f"{process.url}/healthz") as reply:
                if (await reply.json())["database"] == database:
                    return
            await asyncio.sleep(0.1)
