"""Calls other than OpenAI's chat: Anthropic's messages, responses, rerank; what they stream, use and say when they fail."""

from __future__ import annotations

import json

import anthropic
import pytest

from tests.api.gateway.mock_engine import Peer, Seen
from tests.api.gateway.test_gateway_faults import error_of, post

MESSAGES = {"model": "chat", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}
RESPONSES = {"model": "chat", "input": "hi", "max_output_tokens": 50}


def event(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


MESSAGE = {"id": "m1", "type": "message", "role": "assistant", "model": "served", "content": [], "stop_reason": None}
MESSAGE_EVENTS = [
    event("message_start", message={**MESSAGE, "stop_sequence": None, "usage": {"input_tokens": 25, "output_tokens": 1}}),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    event("ping"),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": "one"}),
    event("content_block_delta", index=0, delta={"type": "text_delta", "text": " two"}),
    event("content_block_stop", index=0),
    event("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 15}),
    event("message_stop"),
]
RESPONSE_EVENTS = [
    event("response.created", response={"id": "r1"}),
    event("response.output_text.delta", delta="one"),
    event("response.output_text.delta", delta=" two"),
    event("response.completed", response={"id": "r1", "usage": {"input_tokens": 9, "output_tokens": 4}}),
]


def streaming(*events: bytes, is_cut: bool = False):
    async def answer(seen: Seen, peer: Peer) -> None:
        await peer.open_stream()
        await peer.events(*events)
        if is_cut:
            peer.cut()
        else:
            await peer.end()

    return answer


async def test_anthropics_own_client_streams(gateway, engine, fleet) -> None:
    engine.answer = streaming(*MESSAGE_EVENTS)
    async with (
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client,
        client.messages.stream(**MESSAGES) as stream,
    ):
        text = [part async for part in stream.text_stream]
        final = await stream.get_final_message()
    assert text == ["one", " two"]
    assert (final.usage.input_tokens, final.usage.output_tokens) == (25, 15)
    assert "x-api-key" not in engine.seen[0].headers
    assert engine.seen[0].json == {**MESSAGES, "model": "served", "stream": True}
    (row,) = await fleet.usage()
    assert (row["prompt_tokens"], row["completion_tokens"], row["is_estimated"], row["outcome"]) == (25, 15, False, "completed")


async def test_anthropics_errors(gateway, engine) -> None:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="bpk_wrong", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(**MESSAGES)
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.key, max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(**{**MESSAGES, "model": "none"})
        body = missing.value.body
        assert body["type"] == "error"
        assert body["error"]["code"] == "model_not_found"
        engine.answer = streaming(*MESSAGE_EVENTS[:4], is_cut=True)
        with pytest.raises(anthropic.APIStatusError, match="stopped in the middle"):
            async with client.messages.stream(**MESSAGES) as stream:
                await stream.get_final_message()


@pytest.mark.parametrize(
    ("path", "events", "used"),
    [("/v1/messages", MESSAGE_EVENTS, (25, 15)), ("/v1/responses", RESPONSE_EVENTS, (9, 4))],
)
async def test_streams_pass_byte_for_byte(gateway, engine, http, fleet, path, events, used) -> None:
    engine.answer = streaming(*events)
    body = {**(MESSAGES if path == "/v1/messages" else RESPONSES), "stream": True}
    status, headers, answer = await post(http, gateway, body, path=path)
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    assert answer == b"".join(events)
    (row,) = await fleet.usage()
    assert (row["prompt_tokens"], row["completion_tokens"], row["is_estimated"]) == (*used, False)


async def test_a_stream_that_stops_early_counts_what_was_sent(gateway, engine, http, fleet) -> None:
    engine.answer = streaming(*RESPONSE_EVENTS[:3], is_cut=True)
    status, _, answer = await post(http, gateway, {**RESPONSES, "stream": True}, path="/v1/responses")
    assert status == 200
    last = answer.split(b"\n\n")[-2]
    assert last.startswith(b"event: error\ndata: ")
    assert error_of(last.split(b"data: ")[1])["code"] == "stream_interrupted"
    (row,) = await fleet.usage()
    assert (row["outcome"], row["completion_tokens"], row["is_billable"]) == ("upstream_died", 2, False)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/rerank"])
async def test_whole_answers_and_their_usage(gateway, engine, http, fleet, path) -> None:
    said = {"id": "x", "usage": {"input_tokens": 3, "output_tokens": 2} if path != "/v1/rerank" else {"prompt_tokens": 3}}

    async def answer(seen: Seen, peer: Peer) -> None:
        await peer.json(200, said)

    engine.answer = answer
    body = {"model": "chat", "query": "q", "documents": ["a"], "messages": [], "max_tokens": 4}
    status, _, answered = await post(http, gateway, body, path=path)
    assert (status, json.loads(answered)) == (200, said)
    (row,) = await fleet.usage()
    assert (row["prompt_tokens"], row["completion_tokens"]) == (3, 0 if path == "/v1/rerank" else 2)


async def test_an_engine_without_that_path(gateway, engine, http) -> None:
    async def answer(seen: Seen, peer: Peer) -> None:
        await peer.json(404, {"detail": "Not Found"})

    engine.answer = answer
    for path in ("/v1/rerank", "/v1/responses"):
        status, headers, body = await post(http, gateway, {"model": "chat"}, path=path)
        assert (status, error_of(body)["code"]) == (400, "unsupported_value")
        assert headers["x-should-retry"] == "false"
