"""`bedplate up` as an operator meets it: real processes, killed and stopped, and the same data afterwards."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from pathlib import Path

import asyncpg
import pytest

from controlplane.embedded.cleaning import processes_of
from controlplane.embedded.valkey import Valkey
from tests.system.running import Up, until


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_any_process_and_go_on(up: Up) -> None:
    up.start()
    assert up.status("/healthz") == 200
    assert up.status("/readyz") == 200
    until(lambda: up.shows_metrics_of("worker"), "metrics of the worker")
    until(lambda: up.shows_metrics_of("watch"), "metrics of the watch")
    code, made = up.call("POST", "/v1/projects", {"name": "kept"})
    assert code == 201, made

    refused = subprocess.run(**up.command(), capture_output=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert f"pid {up.process.pid if up.process else 0}" in refused.stderr
    assert "in use" in refused.stderr

    for name in ("api", "worker", "beat", "watch", "gateway", "valkey", "postgres"):
        up.kill(name)
        until(lambda: up.status("/readyz") == 200, f"the API is ready after {name} was killed", 60)
        assert up.call("GET", "/v1/projects/kept")[0] == 200
    until(lambda: up.shows_metrics_of("worker"), "metrics of the worker that came after")
    until(lambda: up.shows_metrics_of("watch"), "metrics of the watch that came after")
    asyncio.run(_flush(Valkey(directory=up.state / "valkey").socket))
    assert up.call("POST", "/v1/projects", {"name": "after-flush"})[0] == 201

    assert up.stop() == 0
    assert processes_of(up.directory) == []
    token = (up.state / "operator-token").read_text()

    (up.directory / "up.log").write_text("")
    up.start()
    assert (up.state / "operator-token").read_text() == token
    assert {item["name"] for item in up.call("GET", "/v1/projects")[1]["items"]} >= {"kept", "after-flush"}
    assert up.stop(signal.SIGTERM) == 0
    assert processes_of(up.directory) == []


async def _flush(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(b"FLUSHALL\r\n")
    assert await reader.readline() == b"+OK\r\n"
    writer.close()
    await writer.wait_closed()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_nothing_outlives_a_killed_supervisor(up: Up) -> None:
    up.start()
    assert up.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: processes_of(up.directory) == [], "all children gone", 40)
    (up.directory / "up.log").write_text("")
    up.start()
    assert up.status("/readyz") == 200
    assert up.stop() == 0


@pytest.mark.slow
async def test_servers_by_url_win(up: Up, empty_database_url: str) -> None:
    valkey = Valkey(directory=up.directory / "own-valkey")
    valkey.prepare()
    server = subprocess.Popen(valkey.argv(), env=valkey.environment(), stdout=subprocess.DEVNULL)
    try:
        up.variables = {"BEDPLATE_DATABASE__URL": empty_database_url, "BEDPLATE_REDIS__URL": valkey.url}
        await asyncio.to_thread(up.start)
        assert up.call("POST", "/v1/projects", {"name": "elsewhere"})[0] == 201
        assert await asyncio.to_thread(up.stop) == 0
    finally:
        server.terminate()
        server.wait(timeout=20)
    assert not (up.state / "postgres").exists()
    assert not (up.state / "valkey").exists()
    connection = await asyncpg.connect(empty_database_url)
    assert await connection.fetchval("SELECT name FROM project") == "elsewhere"
    await connection.close()


def test_a_taken_port_is_said(up: Up) -> None:
    """At once: whoever listens there may be another Bedplate, whose answer would pass for ours."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        up.api = f"127.0.0.1:{holder.getsockname()[1]}"
        done = subprocess.run(**up.command(), capture_output=True, timeout=110, check=False)
    assert done.returncode == 1
    assert f"cannot listen on {up.api}: Address already in use; BEDPLATE_API__LISTEN=HOST:PORT" in done.stderr
    assert "postgres" not in done.stderr, "nothing was started"
    assert processes_of(up.directory) == []


@pytest.mark.caps("root")
def test_a_directory_that_the_server_account_cannot_pass_is_said(up: Up) -> None:
    (up.directory / "closed").mkdir(mode=0o700)
    arguments = up.command()
    arguments["args"][-1] = str(up.directory / "closed/state")
    done = subprocess.run(**arguments, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "chmod o+x" in done.stderr
