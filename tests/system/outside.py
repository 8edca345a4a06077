"""A client on the lab's network, outside of every host, and what it meets at addresses. Ask, and be answered in time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

STAMP = re.compile(r"\[(\d+\.\d+)\].* bytes from")
ANSWER_SECONDS = 1.0


async def answer(address: str, port: int, seconds: float = ANSWER_SECONDS) -> str:
    """`taken`, `refused` or `silent`. A machine's kernel takes a connection, however slow its programs are."""
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(address, port)
            writer.transport.abort()
    except ConnectionRefusedError:
        return "refused"
    except (OSError, TimeoutError):
        return "silent"
    return "taken"


async def connects(address: str, port: int, seconds: float = ANSWER_SECONDS) -> bool:
    return await answer(address, port, seconds) == "taken"


async def until(condition: Callable[[], Awaitable[object]], what: str, seconds: float) -> float:
    """Seconds until it was so."""
    began = time.monotonic()
    while not await condition():
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)
    return time.monotonic() - began


@dataclass
class Requests:
    """One after the other, ten a second, each a connection of its own. `answered`: when; `failed`: how many were not."""

    address: str
    port: int
    answered: list[float] = field(default_factory=list)
    failed: int = 0

    def longest_gap(self, since: float) -> float:
        moments = [since, *(moment for moment in self.answered if moment > since), time.monotonic()]
        return max(later - sooner for sooner, later in itertools.pairwise(moments))

    async def _ask(self) -> None:
        while True:
            if await connects(self.address, self.port):
                self.answered.append(time.monotonic())
            else:
                self.failed += 1
            await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def requests(address: str, port: int) -> AsyncIterator[Requests]:
    made = Requests(address, port)
    task = asyncio.create_task(made._ask())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@dataclass
class Pings:
    """`answered`: when, as it comes."""

    process: asyncio.subprocess.Process
    answered: list[float] = field(default_factory=list)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if found := STAMP.match(line.decode()):
                self.answered.append(float(found[1]))

    def longest_gap(self) -> float:
        return max(later - sooner for sooner, later in itertools.pairwise(self.answered))

    async def flows(self) -> bool:
        return bool(self.answered)


@contextlib.asynccontextmanager
async def pings(address: str, *prefix: str, seconds: int) -> AsyncIterator[Pings]:
    """One flow of pings, 50 ms apart, from wherever `prefix` leads to; at last it ends by itself after so many seconds."""
    argv = (*prefix, "timeout", str(seconds), "ping", "-n", "-D", "-i", "0.05", "-W", "1", address)
    made = Pings(await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE))
    reading = asyncio.create_task(made._read())
    try:
        yield made
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            made.process.terminate()
        await made.process.wait()
