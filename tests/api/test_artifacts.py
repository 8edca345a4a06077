"""Artifacts: taken whole and verified, or not at all; and what is missing is a condition, never a silent substitute."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx2
import pytest

from controlplane.kernel.database import Database
from controlplane.models.host import Host
from controlplane.resources.host.artifacts import ArtifactStore, record
from controlplane.resources.host.errors import ArtifactMismatch, ArtifactUnreachable, ArtifactWrongArchitecture
from controlplane.resources.host.learned import learn
from controlplane.resources.host.program import _wanted
from controlplane.settings import Settings
from hostagent.protocol.facts import HostFacts, KvmFact
from provisioning.artifacts import Artifact, ArtifactsInvalid, architecture_of, load, packages

PROGRAM = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + (62).to_bytes(2, "little") + b"x" * 100_000
FOREIGN = PROGRAM[:18] + (183).to_bytes(2, "little") + PROGRAM[20:]
NAME = "cloud-hypervisor"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


async def put(client: httpx2.AsyncClient, content: bytes, digest: str, name: str = NAME) -> httpx2.Response:
    headers = {"content-type": "application/octet-stream"}
    return await client.put(f"/v1/hosts/artifacts/{name}?sha256={digest}", content=content, headers=headers)


def test_the_list_is_sound_and_says_everything():
    for artifact in load():
        assert artifact.licence
        assert artifact.driver
        assert artifact.source != "url" or artifact.sha256
    assert "qemu-system-x86" in packages("x86_64")
    assert "qemu-system-x86" not in packages("aarch64")


ENTRY = 'format = 1\n[[artifact]]\nname = "a"\nversion = "1"\nlicence = "x"\ndriver = "y"\n'


@pytest.mark.parametrize(
    "text",
    [
        "format = 2",
        ENTRY,
        ENTRY + 'architecture = "x86_64"\nsource = "url"\nfile = "f"\nurl = "http://h/f"\n',
        ENTRY + 'architecture = "vax"\nsource = "package"\npackage = "p"\n',
        ENTRY + 'architecture = "any"\nsource = "package"\npackage = "p"\nhash = "0"\n',
    ],
    ids=["format", "incomplete", "url without digest", "architecture", "unknown key"],
)
def test_a_list_that_leaves_something_open_is_refused(tmp_path: Path, text: str):
    (tmp_path / "list.toml").write_text(text)
    with pytest.raises(ArtifactsInvalid):
        load(tmp_path / "list.toml")


async def test_an_operator_gives_an_artifact_and_confirms_its_digest(operator: httpx2.AsyncClient, settings: Settings):
    (shown,) = (await operator.get("/v1/hosts/artifacts")).json()["items"]
    assert shown["sha256"] is None
    assert shown["expected_sha256"] == ""
    answer = await put(operator, PROGRAM, sha256(PROGRAM))
    assert answer.status_code == 200, answer.text
    assert answer.json()["sha256"] == sha256(PROGRAM)
    held = settings.state_dir / "artifacts" / sha256(PROGRAM)
    assert held.read_bytes() == PROGRAM
    assert architecture_of(held) == "x86_64"
    assert (await operator.get("/v1/hosts/artifacts")).json()["items"][0]["size_bytes"] == len(PROGRAM)


@pytest.mark.parametrize(
    ("content", "digest", "code"),
    [
        (PROGRAM, sha256(b"another"), "host.artifact_mismatch"),
        (PROGRAM[: len(PROGRAM) // 2], sha256(PROGRAM), "host.artifact_mismatch"),
        (FOREIGN, sha256(FOREIGN), "host.artifact_wrong_architecture"),
        (b"#!/bin/sh\n", sha256(b"#!/bin/sh\n"), "host.artifact_wrong_architecture"),
    ],
    ids=["wrong digest", "half of it", "wrong architecture", "no program"],
)
async def test_what_is_not_the_file_leaves_nothing(
    operator: httpx2.AsyncClient, settings: Settings, content: bytes, digest: str, code: str
):
    answer = await put(operator, content, digest)
    assert answer.status_code == 422
    assert answer.json()["code"] == code
    assert list((settings.state_dir / "artifacts").iterdir()) == []
    assert (await operator.get("/v1/hosts/artifacts")).json()["items"][0]["sha256"] is None


async def test_only_listed_names_are_taken(operator: httpx2.AsyncClient):
    answer = await put(operator, PROGRAM, sha256(PROGRAM), name="unknown")
    assert (answer.status_code, answer.json()["code"]) == (404, "host.artifact_unknown")


@contextlib.asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[str]:
    """Says `answer` to whoever connects, and closes."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(say, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/file"


def fetched(url: str, digest: str = sha256(PROGRAM)) -> Artifact:
    more = {"licence": "x", "driver": "y", "file": "f", "url": url, "sha256": digest}
    return Artifact(name="a", version="1", architecture="x86_64", source="url", **more)


def answer(content: bytes, length: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + content


async def test_an_artifact_is_fetched_once(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    async with server(answer(PROGRAM, len(PROGRAM))) as url:
        artifact = fetched(url)
        assert await store.fetch(artifact) == len(PROGRAM)
    assert await store.fetch(artifact) == len(PROGRAM), "the server is gone, the file is here"


async def test_what_cannot_be_fetched_whole_is_not_kept(tmp_path: Path):
    store = ArtifactStore(tmp_path)
    async with server(answer(PROGRAM[:1000], len(PROGRAM))) as url:
        with pytest.raises(ArtifactUnreachable, match="--artifact-dir"):
            await store.fetch(fetched(url))
    async with server(answer(PROGRAM + b"x", len(PROGRAM) + 1)) as url:
        with pytest.raises(ArtifactMismatch):
            await store.fetch(fetched(url))
    async with server(answer(FOREIGN, len(FOREIGN))) as url:
        with pytest.raises(ArtifactWrongArchitecture):
            await store.fetch(fetched(url, sha256(FOREIGN)))
    async with server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        with pytest.raises(ArtifactUnreachable, match="404"):
            await store.fetch(fetched(url))
    with pytest.raises(ArtifactUnreachable, match="cannot be fetched"):
        await store.fetch(fetched("http://127.0.0.1:1/file"))
    assert list((tmp_path / "artifacts").iterdir()) == []


FACTS = HostFacts(
    hostname="h",
    architecture="x86_64",
    os_id="debian",
    os_version="12",
    kernel_version="6.1",
    boot_id="b",
    machine_id="m",
    agent_version="v",
    supervisor="systemd",
    is_virtual_machine=False,
    schedulable_cpus=4,
    schedulable_memory_bytes=8 << 30,
    state_free_bytes=50 << 30,
    state_total_bytes=100 << 30,
    kvm=KvmFact(device_present=True, usable=True),
    machine_drivers=("container", "qemu"),
    storage_drivers=("qsd",),
)


def learned(facts: HostFacts, **config: bool) -> Host:
    host = Host(id="host_x", name="h", config=dict(config), conditions=[], data_interface="")
    learn(host, facts, datetime.now(UTC))
    return host


def test_qemu_never_stands_in_for_a_missing_cloud_hypervisor_unasked():
    missing = learned(FACTS)
    assert "vmm_missing" in {condition["reason"] for condition in missing.conditions}
    assert missing.machine_drivers == ["container"]
    assert learned(FACTS, qemu_on_kvm=True).machine_drivers == ["container", "qemu"]
    complete = learned(replace(FACTS, machine_drivers=("cloud_hypervisor", "container", "qemu")))
    assert "vmm_missing" not in {condition["reason"] for condition in complete.conditions}
    emulated = learned(replace(FACTS, kvm=KvmFact(device_present=False, usable=False)))
    assert "qemu" in emulated.machine_drivers
    assert "kvm_unusable" in {condition["reason"] for condition in emulated.conditions}


@pytest.mark.parametrize(("told", "reason"), [("vmm_too_old:51.1", "vmm_too_old"), ("vmm_broken", "vmm_broken")])
def test_a_cloud_hypervisor_that_may_not_be_used_is_told_apart(told: str, reason: str):
    host = learned(replace(FACTS, conditions=(told,)))
    assert reason in {condition["reason"] for condition in host.conditions}
    assert not {"vmm_missing", told} & {condition["reason"] for condition in host.conditions if condition["reason"] != reason}
    assert host.machine_drivers == ["container"]


async def test_each_newer_file_is_a_newer_generation(database: Database):
    """Also two within one second: a host would refuse another file of the generation that it has."""
    artifact = next(item for item in load() if item.name == NAME and item.architecture == "x86_64")
    wanted = []
    for digest in ("a" * 64, "b" * 64, "b" * 64, "c" * 64):
        async with database.session() as session:
            row = await record(session, artifact, sha256=digest, size_bytes=1)
            wanted.append(_wanted(row, 1))
    numbers = [document.generation.number for document in wanted]
    assert [number - numbers[0] for number in numbers] == [0, 1, 1, 2]
    assert abs(numbers[0] - time.time()) < 60, "above what a deployment that was lost has told"
