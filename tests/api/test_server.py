"""The API as a process: TLS renewed without cutting a stream, event streams, refusals at start, no way to a host."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.cli.certificates import Authority
from tests.api.process import PATIENCE_SECONDS, ROOT, Process, Stream, client_of


@pytest.fixture
def process(tmp_path, database_url):
    made = Process(directory=tmp_path, database_url=database_url, environment={})
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait()


async def test_events_arrive_in_order_and_go_on_where_they_were_cut(process):
    process.start()
    async with client_of(process) as client:
        await process.ready(client)
        client.headers["authorization"] = f"Bearer {process.token}"
        async with client.stream("GET", "/v1/events", params={"after": "0", "kind": "project."}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = Stream(response)
            await asyncio.gather(*(client.post("/v1/projects", json={"name": f"p{number}"}) for number in range(5)))
            events = [await stream.next() for _ in range(5)]
        positions = [int(event["id"]) for event in events]
        assert positions == sorted(positions)
        assert {json.loads(event["data"])["body"]["name"] for event in events} == {f"p{number}" for number in range(5)}
        assert {event["event"] for event in events} == {"project.create"}

        headers = {"last-event-id": str(positions[2])}
        async with client.stream("GET", "/v1/events", params={"kind": "project."}, headers=headers) as response:
            stream = Stream(response)
            assert [int((await stream.next())["id"]) for _ in range(2)] == positions[3:]


async def test_a_member_sees_its_projects_events_only(process):
    process.start()
    async with client_of(process) as client:
        await process.ready(client)
        client.headers["authorization"] = f"Bearer {process.token}"
        for name in ("ours", "theirs"):
            await client.post("/v1/projects", json={"name": name})
        made = (await client.post("/v1/tokens", json={"name": "m", "project": "ours"})).json()
        for project in ("theirs", "ours"):
            await client.patch(f"/v1/projects/{project}", json={"description": "x"})
        as_member = {"authorization": f"Bearer {made['secret']}"}
        async with client.stream("GET", "/v1/events", params={"after": "0"}, headers=as_member) as response:
            stream = Stream(response)
            seen = [json.loads((await stream.next())["data"]) for _ in range(3)]
        assert [event["kind"] for event in seen] == ["project.create", "token.create", "project.update"]
        assert len({event["project_id"] for event in seen}) == 1
        hidden = await client.get("/v1/events", params={"project": "theirs"}, headers=as_member)
        assert hidden.status_code == 404


async def test_streams_end_with_the_process(process):
    process.start()
    async with client_of(process) as client:
        await process.ready(client)
        client.headers["authorization"] = f"Bearer {process.token}"
        async with client.stream("GET", "/v1/events") as response:
            began = time.monotonic()
            process.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_SECONDS):
                async for _ in response.aiter_bytes():
                    pass
        assert await process.ended() == 0
        assert time.monotonic() - began < 8


async def test_a_renewed_certificate_is_taken_in_without_cutting_a_stream(process, tmp_path):
    """Long, because one running server meets the good, the half and the next certificate."""
    authority = Authority.make("test")
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    chain, key = tmp_path / "server.pem", tmp_path / "server.key"

    def write(name: str) -> None:
        issued = authority.issue([name, "127.0.0.1"])
        chain.write_bytes(issued.certificate_pem)
        key.write_bytes(issued.key_pem)

    def presented() -> str:
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        with (
            socket.create_connection(("127.0.0.1", process.port), timeout=5) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as wrapped,
        ):
            names = wrapped.getpeercert()["subjectAltName"]
        return next(value for kind, value in names if kind == "DNS")

    def command(**more: str) -> subprocess.CompletedProcess:
        settings = {"BEDPLATE_URL": f"https://127.0.0.1:{process.port}", "BEDPLATE_TOKEN": process.token, **more}
        environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path)}
        argv = [sys.executable, "-m", "controlplane.cli.main", "token", "current", "-o", "name"]
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)

    write("first.test")
    process.start(BEDPLATE_API__TLS__CERTIFICATE=str(chain), BEDPLATE_API__TLS__KEY=str(key))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    async with client_of(process, "https", verify=context) as client:
        await process.ready(client)
        client.headers["authorization"] = f"Bearer {process.token}"
        async with client.stream("GET", "/v1/events", params={"after": "0", "kind": "project."}) as response:
            stream = Stream(response)
            assert await asyncio.to_thread(presented) == "first.test"
            chain.write_bytes(b"half a certifica")
            await asyncio.sleep(2.5)  # longer than the look at the files
            assert await asyncio.to_thread(presented) == "first.test"
            write("second.test")
            deadline = time.monotonic() + PATIENCE_SECONDS
            while await asyncio.to_thread(presented) != "second.test":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
            await client.post("/v1/projects", json={"name": "search"})
            assert (await stream.next())["event"] == "project.create"
    trusting = await asyncio.to_thread(command, BEDPLATE_CA=str(tmp_path / "ca.pem"))
    assert (trusting.returncode, trusting.stdout.startswith("first-operator")) == (0, True), trusting.stderr
    wary = await asyncio.to_thread(command)
    assert wary.returncode == 1
    assert "BEDPLATE_CA" in wary.stderr


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"BEDPLATE_API__LISTEN": "0.0.0.0:0"}, "plain HTTP on 0.0.0.0"),
        ({"BEDPLATE_DATABASE__URL": "postgresql://x@/x?host=/nonexistent"}, "the database does not answer"),
    ],
)
async def test_refusals_at_start(process, environment, words):
    process.start(**environment)
    assert await process.ended() == 1
    assert words in process.words
    assert "Traceback" not in process.words


async def test_another_master_key_is_refused(process):
    process.start()
    async with client_of(process) as client:
        await process.ready(client)
    process.process.send_signal(signal.SIGTERM)
    assert await process.ended() == 0
    (process.directory / "state/master.key").unlink()
    process.start()
    assert await process.ended() == 1
    assert "put the former key back" in process.words


async def test_token_and_key_are_private_and_in_no_log(process):
    process.start()
    async with client_of(process) as client:
        await process.ready(client)
        client.headers["authorization"] = f"Bearer {process.token}"
        await client.get("/v1/projects")
        await client.post("/v1/tokens", json={"name": "x", "role": "operator"})
    state = process.directory / "state"
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in state.iterdir()} == {
        "master.key": "0o600",
        "operator-link": "0o600",
        "operator-token": "0o600",
    }
    assert process.token not in process.words
    pid = process.process.pid
    for name in ("cmdline", "environ"):
        assert process.token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_a_web_process_cannot_import_what_reaches_hosts(tmp_path):
    program = """
import sys
from controlplane.api import guard, server
guard.install()
guard.install()
import importlib
from controlplane.api.app import routers
assert len(routers()) >= 5
for name in ("asyncssh", "controlplane.remote", "controlplane.remote.link", "controlplane.resources.project.program",
             "controlplane.resources.project.reconcile", "hostagent.drivers", "controlplane.worker.engine"):
    try:
        importlib.import_module(name)
    except guard.HostUnreachableByDesign:
        continue
    sys.exit(f"{name} was imported")
assert not [name for name in sys.modules if name.startswith(("asyncssh", "controlplane.remote", "pyroute2"))]
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
