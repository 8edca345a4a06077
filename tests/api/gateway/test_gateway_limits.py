"""Limits that gateways share: by the real script in a real Valkey, killed, flushed, and between two gateways."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
import redis.asyncio
import uvloop

from controlplane.gateway.directory import KeyEntry, ModelLimits
from controlplane.gateway.limit import Buckets, Limiter
from controlplane.gateway.problem import Problem
from controlplane.gateway.server import listening
from controlplane.gateway.shared import SharedLimits
from controlplane.settings import GatewaySettings, Settings
from tests.api.gateway.conftest import RunningGateway
from tests.api.gateway.talk import CHAT, error_of, post
from tests.valkey import ValkeyServer, valkey_server


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


class Pair:
    """Two gateways' limiters over one Valkey, and what both let through."""

    def __init__(self, url: str) -> None:
        self.limiters: list[Limiter] = []
        for number in range(2):
            shared = SharedLimits(url, f"gw{number}")
            self.limiters.append(Limiter(requests_per_minute=60_000, tokens_per_minute=60_000_000, shared=shared))
            self.limiters[-1].gateways = 2
        self._tasks = [asyncio.ensure_future(limiter.run()) for limiter in self.limiters]

    async def ask(self, number: int, key: KeyEntry, tokens: int = 1, model: str = "") -> Buckets | None:
        """The reservation, or None when it was refused."""
        limiter = self.limiters[number]
        buckets = limiter.buckets(key, time.monotonic(), model)
        try:
            await limiter.reserve(buckets, tokens)
        except Problem:
            return None
        return buckets

    async def count(self, key: KeyEntry, times: int, *, numbers: tuple[int, ...] = (0, 1), tokens: int = 1) -> int:
        """How many of so many requests at each gateway, all at once, are let through; each ends at once, all used up."""
        asked = await asyncio.gather(*(self.ask(number, key, tokens) for _ in range(times) for number in numbers))
        for number, buckets in zip(numbers * times, asked, strict=True):
            if buckets is not None:
                self.limiters[number].release(buckets)
        return sum(buckets is not None for buckets in asked)

    async def until(self, condition) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for limiter in self.limiters:
            await limiter.close()


@pytest.fixture
async def pair(valkey: ValkeyServer) -> AsyncIterator[Pair]:
    await valkey.start()
    pair = Pair(valkey.url)
    yield pair
    await pair.close()


def key_of(**limits) -> KeyEntry:
    return KeyEntry(id="key_1", project_id="p", **limits)


def allowed(limit: int, began: float) -> range:
    """What may be let through since `began`: the bucket, and what has flowed in since."""
    return range(limit, limit + 2 + int(limit * (time.monotonic() - began) / 60))


def test_in_the_loop_of_the_process(valkey: ValkeyServer) -> None:
    """The gateway runs on uvloop, whose transports are other classes."""

    async def ask() -> bool:
        await valkey.start()
        shared = SharedLimits(valkey.url, "gw0")
        limiter = Limiter(requests_per_minute=60, tokens_per_minute=60, shared=shared)
        await limiter.reserve(limiter.buckets(key_of(), time.monotonic()), 1)
        shared.close()
        return shared.is_away

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert not runner.run(ask())


async def test_two_gateways_share_a_rate(pair: Pair) -> None:
    began = time.monotonic()
    assert await pair.count(key_of(requests_per_minute=50), 40) in allowed(50, began)


async def test_a_high_rate_is_not_asked_for_one_by_one(pair: Pair) -> None:
    """3,000 requests at a rate of 60,000 a minute: a handful of questions, and none is let through twice."""
    key = key_of(requests_per_minute=60_000)
    calls = 0
    for limiter in pair.limiters:
        take = limiter._shared.take

        async def counted(*given, _take=take, **named):
            nonlocal calls
            calls += 1
            return await _take(*given, **named)

        limiter._shared.take = counted
    assert await pair.count(key, 1500) == 3000
    assert calls < 60
    bucket = pair.limiters[0].buckets(key, 0).pairs[0][0]
    await pair.until(lambda: bucket.remaining(time.monotonic()) <= 60_000 - 3000 + 1200)


async def test_parallel_requests_reserve_before_they_are_sent(pair: Pair) -> None:
    """100 tokens a minute and five requests for 100 each, at both gateways: one goes (litellm#18730)."""
    assert await pair.count(key_of(tokens_per_minute=100), 5, tokens=100) == 1


async def test_what_was_not_used_comes_back_to_all(pair: Pair) -> None:
    key = key_of(tokens_per_minute=1000)
    buckets = await pair.ask(0, key, 900)
    assert await pair.ask(1, key, 900) is None
    pair.limiters[0].settle(buckets, 50 - 900)
    async with asyncio.timeout(10):
        while await pair.ask(1, key, 900) is None:
            await asyncio.sleep(0.05)
    assert await pair.ask(0, key, 200) is None


async def test_what_was_used_beyond_is_owed(pair: Pair) -> None:
    key = key_of(tokens_per_minute=1000)
    buckets = await pair.ask(0, key, 10)
    pair.limiters[0].settle(buckets, 990)
    async with asyncio.timeout(10):
        while await pair.ask(1, key, 500) is not None:
            await asyncio.sleep(0.3)


async def test_refusals_cost_nothing(pair: Pair) -> None:
    """Refused for want of tokens or of a place: no request is taken; refused by the model's limit: nothing of the key's."""
    key = key_of(
        requests_per_minute=3,
        tokens_per_minute=100,
        max_concurrent=2,
        model_limits={"small": ModelLimits(requests_per_minute=1), "other": ModelLimits(tokens_per_minute=5)},
    )
    first = await pair.ask(0, key, 90)
    for number in (0, 1, 0, 1):
        assert await pair.ask(number, key, 50) is None
    assert (await pair.ask(1, key, 1, "small")) is not None
    assert await pair.ask(1, key, 1) is None, "both places are taken"
    pair.limiters[0].release(first)
    async with asyncio.timeout(10):
        while (third := await pair.ask(1, key, 1)) is None:
            await asyncio.sleep(0.02)
    pair.limiters[1].release(third)
    assert await pair.ask(0, key, 1, "small") is None
    assert await pair.ask(0, key, 1) is None, "three requests a minute"


async def test_a_model_has_limits_of_its_own(pair: Pair) -> None:
    key = key_of(requests_per_minute=30, model_limits={"big": ModelLimits(requests_per_minute=2)})
    asked = [await pair.ask(number % 2, key, 1, "big") for number in range(6)]
    assert sum(buckets is not None for buckets in asked) == 2
    headers = dict(pair.limiters[0].buckets(key, time.monotonic(), "big").headers(time.monotonic()))
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert await pair.ask(0, key, 1, "small") is not None


async def test_places_are_shared_and_come_back(pair: Pair) -> None:
    key = key_of(max_concurrent=3)
    held = [(number, buckets) for number in (0, 1, 0, 1, 0) if (buckets := await pair.ask(number, key))]
    assert len(held) == 3
    for number, buckets in held:
        pair.limiters[number].release(buckets)
    async with asyncio.timeout(10):
        while not await pair.ask(1, key):
            await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        while pair.limiters[1].running < 3:
            await pair.ask(1, key)
    assert await pair.ask(0, key) is None


async def test_a_changed_limit_keeps_what_was_used(pair: Pair) -> None:
    assert await pair.count(key_of(requests_per_minute=10), 5) == 10
    began = time.monotonic()
    assert await pair.count(key_of(requests_per_minute=30), 15) in allowed(20, began)


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
async def test_redis_away(pair: Pair, valkey: ValkeyServer, is_lost: bool) -> None:
    """Over the minute with the loss in it at most a tenth more than the limit goes through, and little less."""
    key, began = key_of(requests_per_minute=300), time.monotonic()
    passed = await pair.count(key, 40)
    passed += await pair.count(key, 40, numbers=(0,))
    assert passed == 120
    await pair.until(lambda: pair.limiters[1].buckets(key, 0).pairs[0][0].remaining(time.monotonic()) < 200)
    valkey.kill()
    passed += await pair.count(key, 30)
    assert passed == 180
    if is_lost:
        shutil.rmtree(valkey.valkey.directory / "appendonlydir")
    await valkey.start()
    await pair.until(lambda: not any(limiter.is_alone for limiter in pair.limiters))
    passed += await pair.count(key, 200)
    most = 300 + 300 * (time.monotonic() - began) / 60
    assert 0.9 * 300 <= passed <= 1.1 * most


async def test_redis_away_for_good(pair: Pair, valkey: ValkeyServer) -> None:
    key, began = key_of(requests_per_minute=200, max_concurrent=1000), time.monotonic()
    passed = await pair.count(key, 30)
    await pair.until(lambda: all(one.buckets(key, 0).pairs[0][0].remaining(time.monotonic()) < 160 for one in pair.limiters))
    valkey.kill()
    passed += await pair.count(key, 300)
    assert 180 <= passed <= 1.1 * (200 + 200 * (time.monotonic() - began) / 60)


async def test_flushed_redis(pair: Pair, valkey: ValkeyServer) -> None:
    key, began = key_of(requests_per_minute=300), time.monotonic()
    assert await pair.count(key, 100) == 200
    await pair.until(lambda: all(one.buckets(key, 0).pairs[0][0].remaining(time.monotonic()) < 120 for one in pair.limiters))
    async with redis.asyncio.Redis(unix_socket_path=str(valkey.valkey.socket)) as client:
        await client.flushall()
    passed = 200 + await pair.count(key, 200)
    assert passed <= 1.1 * (300 + 300 * (time.monotonic() - began) / 60)


async def test_two_gateway_processes(fleet, engine, http, tmp_path, database_url, valkey, monkeypatch) -> None:
    """End to end: shared between two, headers and codes as promised, a change in force within a second.

    Long, because one pair of gateways shows all of it.
    """
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "none.toml"))
    await valkey.start()
    key = await fleet.key(requests_per_minute=6, model_limits=json.dumps({"other": {"requests_per_minute": 1}}))
    await fleet.model("chat", engine.url)
    await fleet.model("other", engine.url)
    async with AsyncExitStack() as stack:
        gateways: list[RunningGateway] = []
        for number in range(2):
            settings = Settings(
                state_dir=tmp_path,
                database={"url": database_url},
                redis={"url": valkey.url},
                gateway=GatewaySettings(listen="127.0.0.1:0", instance=f"gw{number}"),
            )
            app, server, url = await stack.enter_async_context(listening(settings))
            stack.callback(setattr, server, "should_exit", True)
            gateways.append(RunningGateway(url=url, app=app, key=key))
        answers = [await post(http, gateways[number % 2]) for number in range(8)]
        assert [status for status, _, _ in answers] == [200] * 6 + [429] * 2
        _, headers, body = answers[-1]
        assert (error_of(body)["code"], headers["x-ratelimit-limit-requests"]) == ("rate_limit_exceeded", "6")
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(headers["retry-after"]) <= 10
        assert 0 < int(headers["retry-after-ms"]) <= 10_000
        await fleet.execute("UPDATE key SET requests_per_minute = 60", topic="keys")
        async with asyncio.timeout(1):
            while (await post(http, gateways[1]))[0] != 200:
                await asyncio.sleep(0.05)
        asked = [await post(http, gateway, {**CHAT, "model": "other"}) for gateway in gateways]
        assert [status for status, _, _ in asked] == [200, 429]
        assert "other" in error_of(asked[1][2])["message"]
        await gateways[0].app.keeper.recheck()
        async with asyncio.timeout(5):
            while [gateway.app.means.limiter.gateways for gateway in gateways] != [2, 2]:
                await asyncio.sleep(0.05)
        await fleet.execute("DELETE FROM key", topic="keys")
        async with asyncio.timeout(1):
            while (await post(http, gateways[0]))[0] != 401:
                await asyncio.sleep(0.05)
