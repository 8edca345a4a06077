"""Providers outside, played by local ones: OpenAI's API and Anthropic's, as fallbacks, and under their own names."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

import pytest

from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.gateway.body import remove_member
from tests.api.gateway.mock_engine import MockEngine
from tests.api.gateway.talk import CHAT, STREAM, error_of, post

SECRET = "sk-outside-0123456789"
CLAUDE = {"model": "anthropic/claude-3-opus", "messages": [{"role": "user", "content": "hi"}]}
ASKED = {**CLAUDE, "ext_params": {"max_tokens": 1024, "anthropic_version": "2023-06-01"}}


def message(**more: object) -> dict:
    content = [{"type": "text", "text": "hello"}]
    usage = {"input_tokens": 9, "output_tokens": 4}
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-3-opus",
        "content": content,
        "usage": usage,
    } | {
        "stop_reason": "end_turn",
        **more,
    }


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


EVENTS = (
    event("message_start", message={**message(content=[]), "usage": {"input_tokens": 9, "output_tokens": 1}}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("ping"),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hel"}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "lo"}),
    event("content_block_stop", index=0),
    event("content_block_start", index=1, content_block={"type": "tool_use", "id": "t1", "name": "look", "input": {}}),
    event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": '{"a"'}),
    event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": ":1}"}),
    event("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 7}),
    event("message_stop"),
)


async def claude(seen, peer) -> None:
    """Anthropic's side: whole or streamed."""
    if not seen.json.get("stream"):
        return await peer.json(200, message())
    await peer.open_stream()
    await peer.events(*EVENTS)
    return await peer.end()


class Outside:
    """Rows of providers, as the control plane writes them."""

    def __init__(self, fleet, sealer: Sealer) -> None:
        self._fleet = fleet
        self._sealer = sealer

    async def add(self, name: str, kind: str, url: str, models: list[str], project_ids: list[str] | None = None) -> str:
        provider_id = new_id(Kind.PROVIDER)
        sealed = self._sealer.seal(SECRET.encode(), context=f"provider.key:{provider_id}")
        await self._fleet.execute(
            "INSERT INTO provider (id, name, kind, base_url, sealed_key, hint, models, project_ids)"
            " VALUES ($1, $2, $3, $4, $5, '', $6, $7)",
            *(provider_id, name, kind, url, sealed, models, project_ids),
            topic="routes",
        )
        return provider_id


@pytest.fixture
def outside(gateway_settings, fleet) -> Outside:
    key = os.urandom(32)
    path = gateway_settings.state_dir / "master.key"
    path.write_bytes(key)
    path.chmod(0o600)
    return Outside(fleet, Sealer(key))


@pytest.fixture
async def provider() -> AsyncIterator[MockEngine]:
    mock = MockEngine()
    mock.answer = claude
    await mock.start()
    yield mock
    await mock.stop()


async def test_parameters_go_where_they_belong(outside, gateway, provider, http) -> None:
    """The version into the header, the tokens into the body; the client's headers and key stay here."""
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])
    status, headers, body = await post(http, gateway, ASKED, headers={**gateway.headers, "x-private": "1"})
    assert status == 200, body
    (seen,) = provider.seen
    assert (seen.path, seen.headers["anthropic-version"], seen.headers["x-api-key"]) == ("/v1/messages", "2023-06-01", SECRET)
    assert not {"authorization", "x-private", "cookie"} & set(seen.headers)
    said = [{"type": "text", "text": "hi"}]
    assert seen.json == {"model": "claude-3-opus", "max_tokens": 1024, "messages": [{"role": "user", "content": said}]}
    answer = json.loads(body)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == 13
    assert headers["x-bedplate-route"] == "anthropic/claude-3-opus/anthropic/claude-3-opus/default"
    assert SECRET not in str(headers) + body.decode()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_collision_names_both(outside, gateway, provider, http, name: str) -> None:
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])
    status, headers, body = await post(http, gateway, {**ASKED, name: 5})
    assert (status, headers["x-should-retry"]) == (400, "false")
    assert name in error_of(body)["message"]
    assert "ext_params.max_tokens" in error_of(body)["message"]
    assert not provider.seen


async def test_a_stream_becomes_chunks(outside, gateway, fleet, provider) -> None:
    """With OpenAI's own client: text, a tool call in pieces, usage at the end; the account is the provider's."""
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])
    client = gateway.openai()
    text, arguments, usage, finish = "", "", None, None
    async for chunk in await client.chat.completions.create(**CLAUDE, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                arguments += call.function.arguments or ""
    assert (text, arguments, finish) == ("hello", '{"a":1}', "tool_calls")
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (9, 7)
    (record,) = await fleet.usage()
    assert (record["outcome"], record["prompt_tokens"], record["completion_tokens"]) == ("completed", 9, 7)
    assert (record["served_model"], record["is_estimated"]) == ("anthropic/claude-3-opus", False)
    await client.close()


async def test_messages_pass_as_they_are(outside, gateway, provider, http) -> None:
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])
    asked = b'{ "model":"anthropic/claude-3-opus", "max_tokens":5,  "vendor_x": [1, 2], "stream": true, "messages": []}'
    status, _, body = await post(http, gateway, asked, path="/v1/messages")
    assert (status, body) == (200, b"".join(EVENTS))
    assert provider.seen[0].body == asked.replace(b"anthropic/", b"")


async def test_openai_compatible(outside, gateway, provider, engine, http) -> None:
    """Bytes stay but for model and parameters; a collision is refused there too."""
    await outside.add("cloud", "openai", engine.url, ["gpt-x"])
    asked = b'{"model":"cloud/gpt-x","ext_params":{"seed":7}, "vendor_x" : 1,"messages":[]}'
    assert (await post(http, gateway, asked))[0] == 200
    assert engine.seen[-1].headers["authorization"] == f"Bearer {SECRET}"
    assert engine.seen[-1].json == {"model": "gpt-x", "vendor_x": 1, "messages": [], "seed": 7}
    status, _, body = await post(http, gateway, {**CHAT, "model": "cloud/gpt-x", "seed": 1, "ext_params": {"seed": 7}})
    assert status == 400
    assert "'seed' and 'ext_params.seed'" in error_of(body)["message"]
    assert (await post(http, gateway, {**CHAT, "model": "cloud/gpt-x"}, path="/v1/messages"))[0] == 400


async def test_for_whom(outside, gateway, fleet, provider, http) -> None:
    """Of projects that may not, the model does not exist; a key's models hold here too; it is listed."""
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"], [fleet.project_id])
    other = {"authorization": f"Bearer {await fleet.key(project_id=fleet.other_project_id)}"}
    narrow = {"authorization": f"Bearer {await fleet.key(models=['chat'])}"}
    for headers in (other, narrow):
        status, _, body = await post(http, gateway, CLAUDE, headers=headers)
        assert (status, error_of(body)["code"]) == (404, "model_not_found")
    async with http.get(f"{gateway.url}/v1/models", headers=gateway.headers) as reply:
        assert "anthropic/claude-3-opus" in {model["id"] for model in (await reply.json())["data"]}


async def test_refusals_of_providers(outside, gateway, provider, http) -> None:
    """Their 400 and 429 are the client's, in the client's form; what is wrong with our key is not."""
    await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])

    def saying(status: int, *headers: str):
        async def refuse(seen, peer) -> None:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": f"said {status}"}}
            await peer.json(status, error, *headers)

        return refuse

    provider.answer = saying(400)
    status, _, body = await post(http, gateway, CLAUDE)
    assert (status, error_of(body)["message"]) == (400, "said 400")
    provider.answer = saying(429, "retry-after: 7")
    status, headers, _ = await post(http, gateway, CLAUDE)
    assert (status, headers["retry-after"]) == (429, "7")
    for code in (401, 529):
        provider.answer = saying(code)
        status, _, body = await post(http, gateway, CLAUDE)
        assert (status, error_of(body)["code"]) == (502, "upstream_error")


async def test_a_fallback_outside(outside, gateway, fleet, provider, http) -> None:
    """An endpoint without a replica: the provider answers, streams too, and the decision says so."""
    provider_id = await outside.add("anthropic", "anthropic", provider.url, ["claude-3-opus"])
    endpoint_id = await fleet.model("mine")
    await fleet.execute(
        "INSERT INTO route_provider (route_id, rule, fallback_of, provider_id, model, weight)"
        " SELECT id, '', $1, $2, 'claude-3-opus', 0 FROM route WHERE name = 'mine'",
        *(endpoint_id, provider_id),
        topic="routes",
    )
    await gateway.fresh()
    status, headers, body = await post(http, gateway, {**STREAM, "model": "mine"})
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert headers["x-bedplate-route"] == "mine/anthropic/claude-3-opus/default"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"a":1,"x":{"x":2}}', {"a": 1}),
        (b'{ "x" : [1,"x"] , "a" : "x,\\"" }', {"a": 'x,"'}),
        (b'{"b":2,"x":"}","a":1}', {"b": 2, "a": 1}),
        (b'{"x":1}', {}),
        (b'{"a":{"x":1}}', {"a": {"x": 1}}),
    ],
)
def test_a_member_taken_out(body: bytes, left: dict) -> None:
    assert json.loads(remove_member(body, "x")) == left
