"""What the engine gets when a client leaves, what a client gets when time is over, and that chunks do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import pytest

from tests.api.gateway.mock_engine import DONE, delta, usage_event
from tests.api.gateway.talk import CHAT, STREAM, error_of, post


async def _until(condition, seconds: float = 5.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "did not happen"
        await asyncio.sleep(0.01)
    return time.monotonic() - start


@pytest.mark.parametrize("phase", ["before_head", "before_first_token", "mid_stream", "plain"])
async def test_client_leaves(gateway, engine, http, fleet, phase: str) -> None:
    """The engine's request ends within a second, whatever it was doing, and the slot is free."""

    async def answer(seen, peer) -> None:
        if phase in ("before_first_token", "mid_stream"):
            await peer.open_stream()
        if phase == "mid_stream":
            for count in range(1000):
                await peer.events(delta(f" {count}"))
                await asyncio.sleep(0.05)
        await asyncio.sleep(60)

    engine.answer = answer
    body = CHAT if phase == "plain" else STREAM
    task = asyncio.ensure_future(post(http, gateway, body))
    await _until(lambda: engine.seen)
    await asyncio.sleep(0.3)
    assert gateway.app.means.router.in_flight == 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _until(engine.seen[0].gone.is_set, 1.0)
    await _until(lambda: gateway.app.means.router.in_flight == 0, 1.0)
    (record,) = await fleet.usage()
    assert record["outcome"] == "client_closed"
    assert record["is_billable"] == (phase in ("mid_stream", "before_first_token"))
    assert bool(record["completion_tokens"]) == (phase == "mid_stream")


async def test_client_leaves_while_connecting(gateway, http, fleet) -> None:
    """A listener whose backlog is full never answers the connect; leaving ends the attempt."""
    import socket

    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    fillers = [socket.socket() for _ in range(3)]
    try:
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        await fleet.model("full", f"http://127.0.0.1:{listener.getsockname()[1]}", timeouts={"connect": 30})
        task = asyncio.ensure_future(post(http, gateway, {**CHAT, "model": "full"}))
        await _until(lambda: gateway.app.means.router.in_flight == 1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await _until(lambda: gateway.app.means.router.in_flight == 0, 1.0)
    finally:
        for sock in (listener, *fillers):
            sock.close()


async def test_hundred_aborted_streams_leave_nothing(gateway, engine, http, fleet) -> None:
    async def answer(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("x"))
        await asyncio.sleep(60)

    engine.answer = answer

    async def abort() -> None:
        async with http.post(f"{gateway.url}/v1/chat/completions", json=STREAM, headers=gateway.headers) as reply:
            await reply.content.readany()
            reply.close()

    await asyncio.gather(*(abort() for _ in range(100)))
    await _until(lambda: gateway.app.means.router.in_flight == 0)
    assert len(await fleet.usage(count=100)) == 100


async def test_timeouts(gateway, engine, http, fleet) -> None:
    url_of = {"ttft": {"first_token": 0.3}, "idle": {"idle": 0.3}, "total": {"total": 0.3}}
    for name, timeouts in url_of.items():
        await fleet.model(name, engine.url, timeouts=timeouts)

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        if seen.headers["x-request-id"] == "idle":
            await peer.events(delta("one"))
        await asyncio.sleep(60)

    engine.answer = answer
    for name in ("ttft", "total"):
        status, headers, body = await post(
            http, gateway, {**STREAM, "model": name}, headers={**gateway.headers, "x-request-id": name}
        )
        assert (status, error_of(body)["code"]) == (504, f"{name}_timeout")
        assert headers["x-should-retry"] == "false"
    status, _, body = await post(
        http, gateway, {**STREAM, "model": "idle"}, headers={**gateway.headers, "x-request-id": "idle"}
    )
    assert status == 200
    assert error_of(body.split(b"data: ")[-1])["code"] == "idle_timeout"
    assert b"[DONE]" not in body
    await _until(lambda: all(seen.gone.is_set() for seen in engine.seen))
    status, _, body = await post(
        http, gateway, {**CHAT, "model": "total"}, headers={**gateway.headers, "x-request-id": "total"}
    )
    assert (status, error_of(body)["code"]) == (504, "total_timeout")


async def test_chunks_are_flushed(gateway, engine, http) -> None:
    """A small chunk every 150 ms arrives every 150 ms."""

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        for _ in range(6):
            await peer.events(delta("x" * 100))
            await asyncio.sleep(0.15)
        await peer.events(usage_event(), DONE)
        await peer.end()

    engine.answer = answer
    arrivals = []
    async with http.post(f"{gateway.url}/v1/chat/completions", json=STREAM, headers=gateway.headers) as reply:
        while await reply.content.readany():
            arrivals.append(time.monotonic())
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert len(arrivals) >= 6
    assert max(gaps[:5]) < 0.3


async def test_it_says_where_answers_are_open(gateway, engine, http, fleet) -> None:
    """By this a replica that is taken away is left alone until its last answer has ended."""
    go_on = asyncio.Event()

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("one"))
        await go_on.wait()
        await peer.events(usage_event(), DONE)
        await peer.end()

    engine.answer = answer

    async def said(wanted: list[tuple[str, str]]) -> None:
        async with asyncio.timeout(10), fleet.connection() as connection:
            while [tuple(row) for row in await connection.fetch("SELECT gateway, replica_id FROM replica_use")] != wanted:
                await asyncio.sleep(0.05)

    async with http.post(f"{gateway.url}/v1/chat/completions", json=STREAM, headers=gateway.headers) as reply:
        await reply.content.readany()
        await said([("gw0", fleet.replicas[0])])
        go_on.set()
        await reply.read()
    await said([])
