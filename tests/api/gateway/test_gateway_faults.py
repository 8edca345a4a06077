"""What clients get when something is wrong with their request, their key, an engine or a replica."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import openai
import pytest

from tests.api.gateway.mock_engine import MockEngine, delta, well_behaved
from tests.api.gateway.talk import CHAT, STREAM, error_of, post


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
