"""Audio and images: forms that are not held in memory, sound that flows, what was cut is not billed."""

from __future__ import annotations

import asyncio
import io
import json

import aiohttp
import pytest

from tests.api.gateway.mock_engine import DONE
from tests.api.gateway.talk import error_of, post

HEARD = {"text": "hello", "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 3, "total_tokens": 17}}


def form(size: int, *, model: str = "chat", is_model_last: bool = False, **more: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    fields = {"model": model, **more} if model else more
    if not is_model_last:
        for name, value in fields.items():
            data.add_field(name, value)
    data.add_field("file", io.BytesIO(bytes(range(256)) * (size // 256)), filename="a.wav", content_type="audio/wav")
    if is_model_last:
        for name, value in fields.items():
            data.add_field(name, value)
    return data


async def hear(seen, peer) -> None:
    await peer.json(200, HEARD)


@pytest.mark.parametrize("is_model_last", [False, True], ids=["model-first", "model-last"])
async def test_a_form_passes_as_it_is_but_for_the_model(gateway, fleet, engine, http, is_model_last: bool) -> None:
    engine.answer = hear
    data = form(3 << 20, is_model_last=is_model_last, language="en")
    url = f"{gateway.url}/v1/audio/transcriptions"
    async with http.post(url, data=data, headers=gateway.headers) as reply:
        assert (reply.status, await reply.json()) == (200, HEARD)
    (seen,) = engine.seen
    assert "transfer-encoding" not in seen.headers
    boundary = seen.headers["content-type"].partition("boundary=")[2].encode()
    parts = seen.body.split(b"--" + boundary)
    (named,) = [part for part in parts if b'name="model"' in part]
    assert named.endswith(b"\r\n\r\nserved\r\n")
    assert any(part.count(bytes(range(256))) == (3 << 20) // 256 for part in parts)
    (record,) = await fleet.usage()
    assert (record["prompt_tokens"], record["completion_tokens"], record["is_billable"]) == (14, 3, True)


async def test_with_openais_client(gateway, engine) -> None:
    engine.answer = hear
    client = gateway.openai()
    answer = await client.audio.transcriptions.create(model="chat", file=("a.wav", b"RIFF" * 1000))
    assert answer.text == "hello"

    async def paint(seen, peer) -> None:
        await peer.json(200, {"created": 1, "data": [{"b64_json": "x" * 5_000_000}]})

    engine.answer = paint
    image = await client.images.generate(model="chat", prompt="a cat")
    assert len(image.data[0].b64_json) == 5_000_000
    await client.close()


async def test_another_replica_gets_the_whole_form(gateway, fleet, engine, http, unused_tcp_port) -> None:
    engine.answer = hear
    await fleet.model("two", f"http://127.0.0.1:{unused_tcp_port}", engine.url)
    await gateway.fresh()
    for _ in range(3):
        async with http.post(
            f"{gateway.url}/v1/audio/transcriptions", data=form(1 << 20, model="two"), headers=gateway.headers
        ) as reply:
            assert reply.status == 200
    assert len({len(seen.body) for seen in engine.seen}) == 1


async def test_what_is_refused(gateway, gateway_settings, engine, http) -> None:
    """Without a model, cut, no form, too large; nothing reaches the engine, and no file is left."""
    url = f"{gateway.url}/v1/audio/transcriptions"
    async with http.post(url, data=form(1024, model=""), headers=gateway.headers) as reply:
        assert (reply.status, error_of(await reply.read())["param"]) == (400, "model")
    for body, kind in (
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"nothing", "multipart/form-data; boundary=x"),
        (b"", ""),
    ):
        headers = {**gateway.headers, "content-type": kind or "multipart/form-data"}
        async with http.post(url, data=body, headers=headers) as reply:
            assert reply.status == 400
    object.__setattr__(gateway.app, "max_upload_bytes", 1 << 20)
    async with http.post(url, data=form(2 << 20), headers=gateway.headers) as reply:
        assert (reply.status, error_of(await reply.read())["code"]) == (413, "request_too_large")
    assert not engine.seen
    assert not list(gateway.app.spool.glob("*"))


async def test_sound_flows(gateway, fleet, engine, http) -> None:
    """The first bytes are here while the engine still speaks; a client that leaves then is not billed."""
    go_on = asyncio.Event()

    async def speak(seen, peer) -> None:
        await peer.head(200, "content-type: audio/mpeg", "transfer-encoding: chunked")
        await peer.chunk(b"ID3" + b"a" * 997)
        await go_on.wait()
        await peer.chunk(b"b" * 500)
        await peer.end()

    engine.answer = speak
    asked = {"model": "chat", "input": "hello", "voice": "x"}
    async with http.post(f"{gateway.url}/v1/audio/speech", json=asked, headers=gateway.headers) as reply:
        assert reply.headers["content-type"] == "audio/mpeg"
        first = b""
        async with asyncio.timeout(5):
            while len(first) < 999:
                first += await reply.content.readany()
    async with asyncio.timeout(5):
        await engine.seen[0].gone.wait()
    (record,) = await fleet.usage()
    assert (record["outcome"], record["is_billable"]) == ("client_closed", False)
    go_on.set()
    status, _, body = await post(http, gateway, asked, path="/v1/audio/speech")
    assert (status, len(body)) == (200, 1500)


async def test_transcriptions_as_a_stream(gateway, fleet, engine, http) -> None:
    """Its own events, ended by its own last one."""
    events = [{"type": "transcript.text.delta", "delta": "hel"}, {"type": "transcript.text.done", **HEARD}]
    sent = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    async def stream(seen, peer) -> None:
        await peer.open_stream()
        await peer.events(sent)
        await peer.end()

    engine.answer = stream
    url = f"{gateway.url}/v1/audio/transcriptions"
    async with http.post(url, data=form(1024, stream="true"), headers=gateway.headers) as reply:
        assert (await reply.read()).removesuffix(DONE) == sent
    (record,) = await fleet.usage()
    assert (record["outcome"], record["completion_tokens"], record["is_estimated"]) == ("completed", 3, False)


async def test_scopes(gateway, fleet, engine, http) -> None:
    key = {"authorization": f"Bearer {await fleet.key(scopes=['image'])}"}
    engine.answer = hear
    assert (await post(http, gateway, {"model": "chat", "prompt": "x"}, headers=key, path="/v1/images/generations"))[0] == 200
    status, _, body = await post(http, gateway, {"model": "chat", "input": "x"}, headers=key, path="/v1/audio/speech")
    assert (status, error_of(body)["code"]) == (403, "permission_denied")
