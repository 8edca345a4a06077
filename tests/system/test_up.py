"""`bedplate up` as an operator meets it: real processes, killed and stopped, and the same data afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from controlplane.embedded.cleaning import processes_of
from controlplane.embedded.valkey import Valkey

ROOT = Path(__file__).resolve().parents[2]
_UP_SECONDS = 90


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(is_so: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


@dataclass
class Up:
    """One state directory and the `up` that runs on it."""

    directory: Path
    api: str = field(default_factory=lambda: f"127.0.0.1:{_free_port()}")
    gateway: str = field(default_factory=lambda: f"127.0.0.1:{_free_port()}")
    process: subprocess.Popen[str] | None = None

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def command(self, *arguments: str) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BEDPLATE_")}
        environment |= {
            "BEDPLATE_API__LISTEN": self.api,
            "BEDPLATE_GATEWAY__LISTEN": self.gateway,
            "BEDPLATE_CONFIG": str(self.directory / "none.toml"),
            "PYTHONPATH": str(ROOT),
        }
        argv = [sys.executable, "-P", "-m", "controlplane.cli.main", "up", "--state", str(self.state), *arguments]
        return {"args": argv, "env": environment, "cwd": "/", "stdin": subprocess.DEVNULL, "text": True}

    def start(self) -> None:
        log = (self.directory / "up.log").open("a")
        self.process = subprocess.Popen(**self.command(), stdout=log, stderr=log, start_new_session=True)
        log.close()
        until(lambda: self.ended() or self.status("/readyz") == 200, "readyz", _UP_SECONDS)
        until(lambda: self.ended() or self.words().count("up in ") >= 1, "all ready", _UP_SECONDS)
        assert not self.ended(), self.words()

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def words(self) -> str:
        return (self.directory / "up.log").read_text()

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=90)

    def status(self, path: str) -> int:
        with contextlib.suppress(OSError, urllib.error.URLError, TimeoutError):
            try:
                with urllib.request.urlopen(f"http://{self.api}{path}", timeout=2) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                with error:
                    return error.code
        return 0

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        token = (self.state / "operator-token").read_text().strip()
        request = urllib.request.Request(
            f"http://{self.api}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def pid(self, name: str) -> int:
        """The pid that the last status line of the process tells."""
        lines = [line.split() for line in self.words().splitlines() if "(pid " in line]
        return int(next(words[-1] for words in reversed(lines) if words[1] == name).rstrip(")"))

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is there again."""
        old = self.pid(name)
        os.kill(old, signal.SIGKILL)
        until(lambda: self.pid(name) != old, f"{name} started again", 60)


@pytest.fixture
def up() -> Iterator[Up]:
    directory = Path(tempfile.mkdtemp(prefix="bedplate-up-"))
    directory.chmod(0o711)
    one = Up(directory)
    try:
        yield one
    finally:
        if one.process is not None and one.process.poll() is None:
            one.process.terminate()
            one.process.wait(timeout=90)
        for pid in processes_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_any_process_and_go_on(up: Up) -> None:
    up.start()
    assert up.status("/healthz") == 200
    assert up.status("/readyz") == 200
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


def test_a_taken_port_is_said(up: Up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        up.api = f"127.0.0.1:{holder.getsockname()[1]}"
        done = subprocess.run(**up.command(), capture_output=True, timeout=110, check=False)
    assert done.returncode == 1
    assert "api ended with exit code" in done.stderr
    assert "in use" in done.stderr
    assert processes_of(up.directory) == []


@pytest.mark.caps("root")
def test_a_directory_that_the_server_account_cannot_pass_is_said(up: Up) -> None:
    (up.directory / "closed").mkdir(mode=0o700)
    arguments = up.command()
    arguments["args"][-1] = str(up.directory / "closed/state")
    done = subprocess.run(**arguments, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "chmod o+x" in done.stderr
