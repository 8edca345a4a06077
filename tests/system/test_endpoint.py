"""A real model on a lab host, through the whole product: API, kernel, SSH, agent, runc, routes, gateway, OpenAI's SDK."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from controlplane.embedded import showcase
from controlplane.embedded.client import ApiFailed
from provisioning.lab import LabHost
from tests.system.deployment import EMBEDDING_MODEL, Deployed, Json, deploy_inference

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caps("root", "netns", "sshd", "runc", "qemu", "qsd", "debootstrap", "model"),
    pytest.mark.asyncio(loop_scope="module"),
]

ENDPOINTS = f"/v1/projects/{showcase.PROJECT}/endpoints"
TEXTS = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
CHAT = {
    "model": showcase.MODEL,
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "max_tokens": 24,
    "temperature": 0,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed() -> AsyncIterator[Deployed]:
    async with deploy_inference() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployed: Deployed) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's SDK with a key of ours, retries off so that every answer is seen."""
    key = (await deployed.stage.api.post(f"/v1/projects/{showcase.PROJECT}/keys", {"name": "test"}))["secret"]
    async with openai.AsyncOpenAI(
        base_url=f"{deployed.stage.gateway_url}/v1", api_key=key, max_retries=0, timeout=60
    ) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def endpoint(deployed: Deployed) -> Json:
    """`chat` with one replica that is ready; made when a test before has deleted it."""
    if not await deployed.stage.api.call("GET", f"{ENDPOINTS}/chat", missing_ok=True):
        await deployed.stage.api.post(ENDPOINTS, {"name": "chat", "model": showcase.MODEL})
    return await until_ready(deployed)


async def until_ready(deployed: Deployed, replicas: int = 1, seconds: float = 240) -> Json:
    def is_ready(seen: Json) -> bool:
        return seen["status"] == "ready" and seen["observed"]["ready_replicas"] == len(seen["replicas"]) == replicas

    return await deployed.stage.api.until(f"{ENDPOINTS}/chat", is_ready, seconds=seconds)


async def account_of(deployed: Deployed, request_id: str, seconds: float = 60) -> Json:
    """The usage record of one answer, as soon as it has landed."""

    def mine(seen: Json) -> list[Json]:
        return [record for record in seen["items"] if record["request_id"] == request_id]

    path = f"/v1/projects/{showcase.PROJECT}/usage/records"
    (record,) = mine(await deployed.stage.api.until(path, lambda seen: bool(mine(seen)), seconds=seconds))
    return record


async def answer(client: openai.AsyncOpenAI) -> str:
    reply = await client.chat.completions.create(**CHAT)
    return reply.choices[0].message.content or ""


async def answers_again(client: openai.AsyncOpenAI, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            assert await answer(client)
        except openai.APIStatusError as error:
            if error.status_code not in (502, 503) or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def test_a_streamed_answer_and_its_account(deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI) -> None:
    (replica,) = endpoint["replicas"]
    assert (replica["state"], replica["isolation"]) == ("ready", "container")
    stream = await client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    usage = chunks[-1].usage
    assert usage is not None
    record = await account_of(deployed, stream.response.headers["x-request-id"])
    assert (record["prompt_tokens"], record["completion_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)
    assert (record["outcome"], record["replica_id"], record["is_estimated"]) == ("completed", replica["id"], False)
    shown = await deployed.cli("usage", "--total")
    assert showcase.MODEL in shown
    assert "chat" in await deployed.cli("endpoint", "list")
    assert f"serving {showcase.MODEL}" in await deployed.cli("endpoint", "logs", "chat", "--tail", "1M")


async def test_what_the_engine_said_is_read_from_outside(deployed: Deployed, endpoint: Json) -> None:
    assert endpoint["replicas"]
    said = await deployed.cli("endpoint", "logs", "chat", "--tail", "1M")
    assert said.strip()
    (replica, *_) = endpoint["replicas"]
    assert (await deployed.cli("endpoint", "logs", "chat", "--replica", replica["short_id"])).strip()


async def test_a_killed_engine_comes_back(deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI) -> None:
    """The agent restarts it alone; the gateway sends to it again when it serves its model."""
    host = deployed.lab.host(endpoint["replicas"][0]["host"])
    await asyncio.to_thread(host.exec, ["pkill", "-9", "-f", "/opt/engine/serve.py"])
    await answers_again(client)
    await until_ready(deployed)


async def streaming(client: openai.AsyncOpenAI) -> openai.AsyncStream[Any]:
    """A long answer of which some has come."""
    stream = await client.chat.completions.create(**{**CHAT, "max_tokens": 400}, stream=True, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    return stream


async def test_a_client_that_leaves_and_an_engine_that_dies_in_the_middle_are_accounted(
    deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI
) -> None:
    """What was sent is written down as such, and nothing stays open."""
    left = await streaming(client)
    await left.close()
    record = await account_of(deployed, left.response.headers["x-request-id"])
    assert record["outcome"] == "client_closed"
    assert record["completion_tokens"] > 0
    died = await streaming(client)
    host = deployed.lab.host(endpoint["replicas"][0]["host"])
    await asyncio.to_thread(host.exec, ["pkill", "-9", "-f", "/opt/engine/serve.py"])
    with pytest.raises(openai.APIError):
        async for _ in died:
            pass
    record = await account_of(deployed, died.response.headers["x-request-id"])
    assert record["outcome"] == "upstream_died"
    assert record["completion_tokens"] > 0
    await answers_again(client)
    await until_ready(deployed)


async def test_a_gateway_killed_in_the_middle_loses_no_account(
    deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI
) -> None:
    del endpoint
    stream = await streaming(client)
    await asyncio.sleep(1.5)
    await deployed.kill("gateway")
    record = await account_of(deployed, stream.response.headers["x-request-id"])
    assert (record["outcome"], record["is_estimated"]) == ("gateway_died", True)
    assert record["completion_tokens"] > 0
    await stream.close()
    await answers_again(client)


async def test_scaled_to_the_other_host_and_back(deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI) -> None:
    """Two replicas take turns; with one left no request fails."""
    del endpoint
    await deployed.cli("endpoint", "scale", "chat", "2", "--timeout", "240s")
    seen = await until_ready(deployed, replicas=2)
    ids = {replica["short_id"] for replica in seen["replicas"]}
    served: set[str] = set()
    for _ in range(20):
        raw = await client.chat.completions.with_raw_response.create(**{**CHAT, "max_tokens": 1})
        served.add(raw.headers["x-served-by"])
    assert served == ids
    await deployed.stage.api.post(f"{ENDPOINTS}/chat/scale", {"replicas": 1})
    for _ in range(20):
        await client.chat.completions.create(**{**CHAT, "max_tokens": 1})
        await asyncio.sleep(0.2)
    await until_ready(deployed, replicas=1)


async def test_another_shape_is_rolled_out_and_no_request_fails(
    deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI
) -> None:
    """The new replica takes a share, then all; the old one goes; whoever asks meanwhile is answered each time."""
    (before,) = endpoint["replicas"]
    memory = endpoint["wanted"]["memory_bytes"] + (64 << 20)
    exchange = {"weight": 50, "watch_seconds": 2, "ramp_seconds": 2}
    update = {"memory_bytes": memory, "rollout": exchange}
    await deployed.stage.api.call("PATCH", f"{ENDPOINTS}/chat", update)
    served: set[str] = set()
    async with asyncio.timeout(240):
        while True:
            raw = await client.chat.completions.with_raw_response.create(**{**CHAT, "max_tokens": 1})
            served.add(raw.headers["x-served-by"])
            seen = await deployed.stage.api.call("GET", f"{ENDPOINTS}/chat")
            if seen["rollout"] is None and seen["revision"] > endpoint["revision"]:
                break
            await asyncio.sleep(0.2)
    seen = await until_ready(deployed, replicas=1)
    (after,) = [replica for replica in seen["replicas"] if replica["state"] == "ready"]
    assert {before["short_id"], after["short_id"]} <= served
    assert (after["revision"], seen["wanted"]["memory_bytes"]) == (seen["revision"], memory)


async def test_real_embeddings_from_a_vm(deployed: Deployed, client: openai.AsyncOpenAI) -> None:
    """Emulated where no KVM works: a guest boots with engine and weights, serves, comes back when killed, goes when deleted."""
    api, path = deployed.stage.api, f"{ENDPOINTS}/embeddings"
    began = time.monotonic()
    await api.post(ENDPOINTS, {"name": "embeddings", "model": EMBEDDING_MODEL, "isolation": "vm"})
    seen = await api.until(path, lambda seen: seen["status"] == "ready", seconds=300)
    print(f"request_to_ready: {time.monotonic() - began:.1f} s")
    (replica,) = seen["replicas"]
    host = await api.get(f"/v1/hosts/{replica['host']}")
    has_kvm = not any(condition["reason"] == "kvm_unusable" for condition in host["conditions"])
    assert (replica["isolation"], replica["driver"]) == ("vm", "qemu")
    assert replica["accelerator"] == ("kvm" if has_kvm else "tcg")
    assert ("emulated" in seen["observed"]["isolation_reason"]) == (not has_kvm)

    reply = await client.embeddings.with_raw_response.create(model=EMBEDDING_MODEL, input=TEXTS)
    assert reply.headers["x-served-by"] == replica["short_id"]
    cat, kitten, rates = (entry.embedding for entry in reply.parse().data)
    assert len(cat) == 384
    assert product(cat, kitten) > 0.5 > 0.3 > product(cat, rates)
    record = await account_of(deployed, reply.headers["x-request-id"])
    assert (record["prompt_tokens"], record["outcome"], record["replica_id"]) == (25, "completed", replica["id"])
    said = await deployed.cli("endpoint", "logs", "embeddings", "--tail", "1M")
    assert f"serving {EMBEDDING_MODEL}" in said
    assert "port 8000 is open" in said
    print("\n".join(line for line in said.splitlines() if line.startswith(("boot:", "workload:", "loaded"))))
    images = (await api.get("/v1/images"))["items"]
    guest = next(image for image in images if image["name"] == showcase.IMAGE)
    with pytest.raises(ApiFailed, match=r"image\.in_use"):
        await api.call("DELETE", f"/v1/images/{guest['id']}")

    lab_host = deployed.lab.host(replica["host"])
    began = time.monotonic()
    await asyncio.to_thread(lab_host.exec, ["pkill", "-9", "qemu-system"])
    await embeds_again(client)
    print(f"killed_to_answer: {time.monotonic() - began:.1f} s")
    await deployed.cli("endpoint", "delete", "embeddings", "--yes", "--timeout", "120s")
    await asyncio.to_thread(check_gone, lab_host, replica["vm_id"])


def check_gone(host: LabHost, vm_id: str) -> None:
    listed = ["sh", "-c", "ps -eo args; ip -o link; ls /run/bedplate/vm /run/bedplate/volume; find /var/lib/bedplate/vm*"]
    left = host.exec(listed, check=False).stdout.decode()
    assert "qemu-system" not in left
    assert "storage-daemon" not in left
    assert vm_id not in left


def product(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


async def embeds_again(client: openai.AsyncOpenAI, seconds: float = 180) -> None:
    """First it must be noticed that nobody answers, so a request may hang for as long as the gateway waits to connect."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer = await client.embeddings.create(model=EMBEDDING_MODEL, input=TEXTS[0])
        except openai.APIStatusError as error:
            if error.status_code not in (502, 503) or time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            assert len(answer.data[0].embedding) == 384
            return


async def test_deleted_without_a_trace(deployed: Deployed, endpoint: Json, client: openai.AsyncOpenAI) -> None:
    del endpoint
    await deployed.cli("endpoint", "delete", "chat", "--yes", "--timeout", "120s")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve(showcase.MODEL)
    for name in ("lab1", "lab2"):
        found = await asyncio.to_thread(
            deployed.lab.host(name).exec, ["sh", "-c", "ps -eo args | grep -c '[s]erve.py --model'; ip -o link"], check=False
        )
        lines = found.stdout.decode().splitlines()
        assert lines[0] == "0", lines
        assert not [line for line in lines[1:] if "vm_" in line]
