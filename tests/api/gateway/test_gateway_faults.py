"""What clients get when something is wrong, and what the engine gets when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import aiohttp
import openai
import pytest

from tests.api.gateway.mock_engine import DONE, MockEngine, delta, usage_event, well_behaved

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**CHAT, "stream": True}


async def post(http, gateway, body=CHAT, *, headers=None, path="/v1/chat/completions"):
    """Status, headers and body of one call."""
    options = {"data": body} if isinstance(body, bytes) else {"json": body}
    async with http.post(gateway.url + path, headers=gateway.headers if headers is None else headers, **options) as reply:
        return reply.status, reply.headers, await reply.read()


def error_of(body: bytes) -> dict:
    import json

    document = json.loads(body)
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return document["error"]


async def test_wrong_keys_are_refused_alike(gateway, fleet, http) -> None:
    expired = await fleet.key(expires_at=_past())
    revoked = await fleet.key()
    await fleet.execute("DELETE FROM key WHERE hint = $1", revoked[-4:], topic="keys")
    bodies = set()
    for header in (None, "Bearer", "Bearer nonsense", "Basic abc", f"Bearer {expired}", f"Bearer {revoked}", "Bearer bpk_x"):
        status, headers, body = await post(http, gateway, headers={"authorization": header} if header else {})
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        assert headers["x-should-retry"] == "false"
        assert error_of(body)["code"] == "invalid_api_key"
        bodies.add(body)
    assert len(bodies) == 1


def _past():
    from datetime import UTC, datetime, timedelta

    return datetime.now(UTC) - timedelta(hours=1)


async def test_sdk_raises_the_right_errors(gateway) -> None:
    async with gateway.openai("bpk_wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(**CHAT)
    async with gateway.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**{**CHAT, "model": "none"})
        assert missing.value.code == "model_not_found"
        assert missing.value.request_id
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")


async def test_invisible_models_look_like_missing_ones(gateway, fleet, engine, http) -> None:
    await fleet.model("theirs", engine.url, project_id=fleet.other_project_id)
    narrow = await fleet.key(models=["other"])
    answers = []
    for key, model in ((gateway.key, "theirs"), (gateway.key, "nowhere"), (narrow, "chat")):
        status, _, body = await post(http, gateway, {**CHAT, "model": model}, headers={"authorization": f"Bearer {key}"})
        assert status == 404
        answers.append(error_of(body)["message"].replace(model, "X"))
    assert len(set(answers)) == 1
    assert not engine.seen


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"messages":[]}', "model"),
        (b'{"model":7}', "model"),
        (b'{"model":""}', "model"),
        (b'{"model":"chat","stream":true,"stream_options":7}', "stream_options"),
    ],
)
async def test_bad_bodies(gateway, engine, http, body: bytes, param: str | None) -> None:
    status, headers, answer = await post(http, gateway, body)
    assert status == 400
    assert headers["x-should-retry"] == "false"
    assert headers["content-type"] == "application/json"
    assert error_of(answer)["param"] == param
    assert not engine.seen


async def test_other_paths_and_methods(gateway, http) -> None:
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/", 404),
    ):
        async with http.request(method, gateway.url + path, headers=gateway.headers) as reply:
            assert reply.status == status
            assert error_of(await reply.read())["type"] == "invalid_request_error"


async def test_body_too_large(gateway, http) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(**CHAT, extra_body={"pad": "x" * (2 << 20)})
    assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")

    async def endless():
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                yield b"x" * (1 << 16)

    with contextlib.suppress(aiohttp.ClientConnectionError):
        async with http.post(f"{gateway.url}/v1/chat/completions", data=endless(), headers=gateway.headers) as reply:
            assert reply.status == 413


async def test_engine_refusals_pass_unchanged(gateway, engine, http, fleet) -> None:
    said = b'{"error" : {"message":"too long","type":"BadRequest","param":null,"code":400}, "extra":1}'
    for status, retry in ((400, "false"), (422, "false"), (429, None)):

        async def answer(seen, peer, status=status) -> None:
            await peer.json(status, said, "retry-after: 7")

        engine.answer = answer
        engine.seen.clear()
        for body in (CHAT, STREAM):
            got, headers, text = await post(http, gateway, body)
            assert (got, text) == (status, said)
            assert headers["retry-after"] == "7"
            assert headers.get("x-should-retry") == retry
        assert len(engine.seen) == 2, "an engine's refusal is not tried again"
    records = await fleet.usage(count=6)
    assert {(r["outcome"], r["prompt_tokens"], r["is_billable"]) for r in records} == {("refused", 0, False)}


@pytest.mark.parametrize(
    ("status", "ours", "code"), [(500, 502, "upstream_error"), (503, 503, "overloaded"), (401, 502, "upstream_error")]
)
async def test_engine_faults_keep_their_words_here(gateway, engine, http, status: int, ours: int, code: str) -> None:
    async def answer(seen, peer) -> None:
        await peer.json(status, {"error": {"message": f"secret trace at {engine.url}"}})

    engine.answer = answer
    got, headers, body = await post(http, gateway)
    assert (got, error_of(body)["code"]) == (ours, code)
    assert len(engine.seen) == 1, "a generation is not paid twice"
    assert b"secret" not in body
    assert str(engine.port) not in f"{headers}{body!r}"
    engine.answer = well_behaved
    assert (await post(http, gateway))[0] == 200, "one client's fault is not everybody's"


async def test_no_replica(gateway, http, fleet) -> None:
    await fleet.model("asleep")
    status, headers, body = await post(http, gateway, {**CHAT, "model": "asleep"})
    assert (status, error_of(body)["code"]) == (503, "model_loading")
    assert int(headers["retry-after"]) > 0
    async with http.get(f"{gateway.url}/v1/models/asleep", headers=gateway.headers) as reply:
        assert reply.status == 200


async def test_another_replica_when_one_cannot_be_connected_to(gateway, http, fleet, engine) -> None:
    gone = MockEngine()
    await gone.start()
    await gone.stop()
    await fleet.model("two", gone.url, engine.url)
    attempts = set()
    for _ in range(12):
        status, headers, _ = await post(http, gateway, {**CHAT, "model": "two"})
        assert status == 200
        attempts.add(headers["x-route-attempts"])
    assert attempts <= {"1", "2"}
    assert "2" in attempts
    await fleet.model("one", gone.url)
    status, headers, body = await post(http, gateway, {**CHAT, "model": "one"})
    assert (status, error_of(body)["code"]) == (502, "upstream_error")
    assert str(gone.port) not in f"{headers}{body!r}"
    records = await fleet.usage(count=13)
    assert len(records) == 13, "one record a request, however many attempts"


@pytest.mark.parametrize("end", ["cut", "clean"])
async def test_death_in_the_middle_of_a_stream(gateway, engine, http, fleet, end: str) -> None:
    async def answer(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(delta("one"), delta(" two"), b'data: {"choi')
        if end == "cut":
            await asyncio.sleep(0.1)
            return peer.cut()
        return await peer.end()

    engine.answer = answer
    status, _, body = await post(http, gateway, STREAM)
    assert status == 200
    assert body.startswith(delta("one") + delta(" two"))
    assert b"[DONE]" not in body
    assert error_of(body.split(b"data: ")[-1])["code"] == "stream_interrupted"
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(**STREAM)
        with pytest.raises(openai.APIError):
            [chunk async for chunk in stream]
    record = (await fleet.usage(count=2))[0]
    assert (record["outcome"], record["completion_tokens"]) == ("upstream_died", 2)
    assert record["is_estimated"]
    assert not record["is_billable"]


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_death_before_the_first_byte_keeps_its_code(gateway, engine, http, body: dict) -> None:
    async def before_head(seen, peer) -> None:
        peer.cut()

    async def after_head(seen, peer) -> None:
        await peer.open_stream()
        await asyncio.sleep(0.05)
        peer.cut()

    async def malformed(seen, peer) -> None:
        await peer.raw(b"NONSENSE\r\n\r\n")
        peer.cut()

    for answer in (before_head, after_head, malformed):
        engine.answer = answer
        status, _, text = await post(http, gateway, body)
        assert (status, error_of(text)["code"]) == (502, "upstream_error")


async def test_dead_pooled_connections_are_not_the_clients_trouble(gateway, engine, http) -> None:
    """A host that went down says nothing: only the next request on a kept connection finds out, and goes out again."""
    engine.resets_reused = True
    for _ in range(5):
        status, headers, _ = await post(http, gateway)
        assert (status, headers["x-route-attempts"]) == (200, "1")


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


async def test_token_limit_is_reserved_before_sending(gateway, engine, http, fleet) -> None:
    """Five at once on a limit of 100 tokens: exactly one goes through, and refusals cost nothing."""
    key = await fleet.key(tokens_per_minute=100, requests_per_minute=10)
    headers = {"authorization": f"Bearer {key}"}
    calls = [post(http, gateway, {**CHAT, "max_tokens": 100}, headers=headers) for _ in range(5)]
    answers = await asyncio.gather(*calls)
    assert sorted(status for status, _, _ in answers) == [200, 429, 429, 429, 429]
    refused = next(answer for answer in answers if answer[0] == 429)
    assert error_of(refused[2])["type"] == "rate_limit_error"
    assert int(refused[1]["retry-after"]) >= 1
    assert int(refused[1]["retry-after-ms"]) >= 1
    assert refused[1]["x-ratelimit-remaining-requests"] == "9"
    assert len(engine.seen) == 1


async def test_unspent_tokens_are_given_back(gateway, http, fleet) -> None:
    key = await fleet.key(tokens_per_minute=1000)
    headers = {"authorization": f"Bearer {key}"}
    for _ in range(5):
        status, answered, _ = await post(http, gateway, {**CHAT, "max_tokens": 900}, headers=headers)
        assert status == 200
    assert int(answered["x-ratelimit-limit-tokens"]) == 1000


async def test_key_changes_take_effect_within_a_second(gateway, fleet, http) -> None:
    key = await fleet.key(models=["chat"])
    headers = {"authorization": f"Bearer {key}"}
    assert (await post(http, gateway, headers=headers))[0] == 200
    await fleet.execute("UPDATE key SET models = '{other}' WHERE hint = $1", key[-4:], topic="keys")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 404:
        assert time.monotonic() - start < 1.0
    await fleet.execute("DELETE FROM key WHERE hint = $1", key[-4:], topic="keys")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 401:
        assert time.monotonic() - start < 1.0


async def test_lost_notification_costs_a_second(gateway, fleet, http) -> None:
    """The version number alone suffices."""
    key = await fleet.key()
    headers = {"authorization": f"Bearer {key}"}
    assert (await post(http, gateway, headers=headers))[0] == 200
    async with fleet.connection() as connection, connection.transaction():
        await connection.execute("DELETE FROM key WHERE hint = $1", key[-4:])
        await connection.execute("UPDATE gateway_version SET version = version + 1 WHERE topic = 'keys'")
    start = time.monotonic()
    while (await post(http, gateway, headers=headers))[0] != 401:
        assert time.monotonic() - start < 2.5
        await asyncio.sleep(0.05)


async def test_health_and_metrics(gateway, http) -> None:
    await post(http, gateway)
    await post(http, gateway, {**CHAT, "model": "x" * 100})
    async with http.get(f"{gateway.url}/healthz") as reply:
        assert (reply.status, await reply.json()) == (200, {"status": "ok", "database": "up"})
    async with http.get(f"{gateway.url}/metrics") as reply:
        text = await reply.text()
    assert 'bedplate_gateway_requests_total{model="chat",status="200"} 1.0' in text
    assert 'bedplate_gateway_requests_total{model="unknown",status="404"} 1.0' in text
    assert 'bedplate_gateway_tokens_total{kind="completion",model="chat"} 3.0' in text
    assert "bedplate_gateway_inflight 0.0" in text
