"""How requests are sent: closed (so many at a time) or open (so many a second, whatever comes back).

The one rule: an open loop never waits for answers, or a slow server would slow its own load down.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from controlplane.cli.load.call import Called, call
from controlplane.cli.load.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`url` up to and without `/chat/completions`. `timeout_seconds` is for one whole call."""

    url: str
    key: str = ""
    timeout_seconds: float = 600.0
    ca_file: str = ""

    @property
    def chat(self) -> str:
        return f"{self.url.rstrip('/')}/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        return headers | ({"authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`concurrency` (closed) or `rate` a second (open, Poisson arrivals), for `seconds` or `requests`, whichever ends first."""

    concurrency: int | None = None
    rate: float | None = None
    seconds: float = 30.0
    requests: int | None = None
    warm_up_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """`calls` began after the warm-up; `seconds` is from then to the last end."""

    calls: list[Called]
    seconds: float


async def drive(target: Target, workload: Workload, plan: Plan) -> Ran:
    import ssl

    context = ssl.create_default_context(cafile=target.ca_file) if target.ca_file else True
    connector = aiohttp.TCPConnector(limit=0, ssl=context)
    timeout = aiohttp.ClientTimeout(total=target.timeout_seconds)
    began = time.monotonic()
    bodies = workload.bodies()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        if plan.rate is None:
            calls = await _closed(session, target, bodies, plan, began)
        else:
            calls = await _open(session, target, bodies, plan, began, random.Random(workload.seed))  # noqa: S311 - repeatable
    start = began + plan.warm_up_seconds
    kept = [one for one in calls if one.began >= start]
    return Ran(calls=kept, seconds=max((one.ended for one in kept), default=start) - start)


async def _closed(
    session: aiohttp.ClientSession, target: Target, bodies: Iterator[bytes], plan: Plan, began: float
) -> list[Called]:
    calls: list[Called] = []
    left = plan.requests

    async def user() -> None:
        nonlocal left
        while time.monotonic() < began + plan.seconds and left != 0:
            if left is not None:
                left -= 1
            calls.append(await call(session, target.chat, next(bodies), target.headers))
            if calls[-1].error:
                await asyncio.sleep(0.1)  # a server that refuses at once is not asked as fast as it can refuse

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency or 1):
            group.create_task(user())
    return calls


async def _open(
    session: aiohttp.ClientSession, target: Target, bodies: Iterator[bytes], plan: Plan, began: float, dice: random.Random
) -> list[Called]:
    assert plan.rate is not None
    at, sent = began, 0
    tasks: list[asyncio.Task[Called]] = []
    async with asyncio.TaskGroup() as group:
        while at < began + plan.seconds and sent != plan.requests:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            tasks.append(group.create_task(call(session, target.chat, next(bodies), target.headers)))
            sent += 1
            at += dice.expovariate(plan.rate)
    return [task.result() for task in tasks]
