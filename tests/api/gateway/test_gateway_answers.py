"""What clients get: answers byte for byte, in the forms that OpenAI's SDK expects."""

from __future__ import annotations

import json

from tests.api.gateway.mock_engine import DONE, USAGE, delta, usage_event

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hi"}]}


async def test_openai_sdk_plain(gateway, fleet) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == "one two three"
    assert answer.usage.total_tokens == 10
    (record,) = await fleet.usage()
    assert (record["prompt_tokens"], record["completion_tokens"], record["outcome"]) == (7, 3, "completed")
    assert record["is_billable"]
    assert not record["is_estimated"]


async def test_openai_sdk_stream(gateway, fleet, engine) -> None:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three"
    assert engine.seen[-1].json["stream_options"] == {"include_usage": True}
    (record,) = await fleet.usage()
    assert (record["prompt_tokens"], record["completion_tokens"], record["is_stream"]) == (7, 3, True)
    assert record["first_token_ms"] is not None


async def test_usage_chunk_only_when_asked(gateway) -> None:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 10


async def test_stream_is_byte_exact(gateway, engine, http) -> None:
    """Comments, unknown fields, odd spacing and CRLF events pass; only the usage chunk that was not asked for goes."""
    sent = [
        b": keep-alive\n\n",
        delta(role="assistant"),
        b'data:  {"choices": [ {"delta": {"reasoning" : "hm", "vendor":{"x":[1, 2]}} } ] , "zz":1}\n\n',
        b'event: x\r\ndata: {"choices":[{"delta":{"content":"a"}}]}\r\n\r\n',
        b'data: {"choices":[],"prompt_filter_results":[]}\n\n',
        delta(tool_calls=[{"index": 0, "function": {"arguments": '{"a'}}]),
    ]

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        whole = b"".join(sent) + usage_event() + DONE
        for start in range(0, len(whole), 17):
            await peer.chunk(whole[start : start + 17])
        await peer.end()

    engine.answer = answer
    async with http.post(f"{gateway.url}/v1/chat/completions", json={**CHAT, "stream": True}, headers=gateway.headers) as reply:
        body = await reply.read()
    assert body == b"".join(sent) + DONE
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert "content-length" not in reply.headers


async def test_request_body_is_byte_exact(gateway, engine, http, fleet) -> None:
    """With the engine's own model id nothing changes; with another only the id does."""
    await fleet.model("served", engine.url)
    body = (
        b'{ "guided_choice":["a"],\n "model":"served" , "nested": {"model":"served"}, "n": 1.50, "vendor_x": {"\\u00e9": 1e3}}'
    )
    headers = {**gateway.headers, "content-type": "application/json"}
    await (await http.post(f"{gateway.url}/v1/chat/completions", data=body, headers=headers)).read()
    assert engine.seen[-1].body == body
    other = body.replace(b'"model":"served" ', b'"model": "chat" ')
    await (await http.post(f"{gateway.url}/v1/chat/completions", data=other, headers=headers)).read()
    assert engine.seen[-1].body == other.replace(b'"model": "chat"', b'"model": "served"')


async def test_stream_options_are_merged(gateway, engine, http) -> None:
    for given in ({}, {"include_usage": False}, {"include_usage": False, "vendor": 1}):
        body = {**CHAT, "stream": True, "stream_options": given}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers) as reply:
            text = await reply.text()
        assert engine.seen[-1].json["stream_options"] == {**given, "include_usage": True}
        assert '"choices": []' not in text


async def test_continuous_usage_is_taken_out_again(gateway, engine, http, fleet) -> None:
    await fleet.model("running", engine.url, engine={"has_continuous_usage": True})

    async def answer(seen, peer) -> None:
        await peer.open_stream()
        for count in (1, 2):
            chunk = {"choices": [{"delta": {"content": "a"}}], "usage": {**USAGE, "completion_tokens": count}}
            await peer.events(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await peer.events(usage_event({**USAGE, "completion_tokens": 2}), DONE)
        await peer.end()

    engine.answer = answer
    url = f"{gateway.url}/v1/chat/completions"
    body = {**CHAT, "model": "running", "stream": True}
    async with http.post(url, json=body, headers=gateway.headers) as reply:
        assert b"usage" not in await reply.read()
    assert engine.seen[-1].json["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    body["stream_options"] = {"include_usage": True}
    async with http.post(url, json=body, headers=gateway.headers) as reply:
        events = [json.loads(line[6:]) for line in (await reply.text()).split("\n\n")[:-2]]
    assert [event["usage"] and event["usage"]["completion_tokens"] for event in events] == [None, None, 2]


async def test_long_answer_flows(gateway, engine, http, fleet) -> None:
    """12 MB in one answer: every byte arrives and it is accounted for."""
    document = {"choices": [{"message": {"content": "x" * (12 << 20)}}], "usage": USAGE}

    async def answer(seen, peer) -> None:
        await peer.json(200, document)

    engine.answer = answer
    async with http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=gateway.headers) as reply:
        assert await reply.json() == document
    assert (await fleet.usage())[0]["completion_tokens"] == 3


async def test_embeddings_and_completions(gateway, engine, fleet) -> None:
    async def answer(seen, peer) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}]
        await peer.json(
            200, {"object": "list", "data": data, "model": "served", "usage": {"prompt_tokens": 4, "total_tokens": 4}}
        )

    engine.answer = answer
    async with gateway.openai() as client:
        reply = await client.embeddings.create(model="chat", input="text", encoding_format="float")
    assert reply.data[0].embedding == [0.5, 0.25]
    assert engine.seen[-1].path == "/v1/embeddings"
    (record,) = await fleet.usage()
    assert (record["prompt_tokens"], record["completion_tokens"]) == (4, 0)


async def test_models(gateway, fleet, engine) -> None:
    """What this key may call, sleeping models included, ids with slashes and colons too."""
    await fleet.model("org/model:7b", context_tokens=4096)
    await fleet.model("theirs", engine.url, project_id=fleet.other_project_id)
    await gateway.fresh()
    async with gateway.openai() as client:
        listed = await client.models.list()
        assert [model.id for model in listed.data] == ["chat", "org/model:7b"]
        shown = await client.models.retrieve("org/model:7b")
    assert shown.owned_by == "bedplate"
    assert shown.model_dump()["meta"] == {"state": "not_ready", "context_tokens": 4096}


async def test_headers_on_every_answer(gateway, http, fleet) -> None:
    always = {"x-request-id", "x-served-by", "x-route-attempts", "x-queue-ms"}
    always |= {f"x-ratelimit-{word}-{what}" for word in ("limit", "remaining", "reset") for what in ("requests", "tokens")}
    url = f"{gateway.url}/v1/chat/completions"
    for headers, body in (
        (gateway.headers, CHAT),
        ({}, CHAT),
        (gateway.headers, {**CHAT, "model": "none"}),
        (gateway.headers, []),
    ):
        async with http.post(url, json=body, headers=headers) as reply:
            assert always <= {name.lower() for name in reply.headers}, reply.status
    async with http.post(url, json=CHAT, headers={**gateway.headers, "x-request-id": "mine-1"}) as reply:
        assert reply.headers["x-request-id"] == "mine-1"
        assert reply.headers["x-served-by"] == fleet.replicas[0][-8:]
        assert reply.headers["x-ratelimit-reset-requests"].endswith("s")


async def test_request_headers(gateway, engine, http) -> None:
    """Credentials and hop-by-hop headers stay here; the rest, and the request id, travel."""
    sent = {
        **gateway.headers,
        "cookie": "a=b",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "r1",
        "x-vendor": "v",
        "connection": "x-hop",
        "x-hop": "1",
    }
    await (await http.post(f"{gateway.url}/v1/chat/completions", json=CHAT, headers=sent)).read()
    arrived = engine.seen[-1].headers
    assert arrived["traceparent"] == sent["traceparent"]
    assert (arrived["x-request-id"], arrived["x-vendor"], arrived["accept-encoding"]) == ("r1", "v", "identity")
    assert not {"authorization", "cookie", "x-hop"} & set(arrived)
