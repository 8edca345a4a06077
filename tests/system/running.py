"""One `bedplate up` on a state directory of its own, for tests that look at a whole deployment from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.directory / "state"

    def command(self, *arguments: str) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BEDPLATE_")}
        environment |= self.variables | {
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

    def shows_metrics_of(self, name: str) -> bool:
        """Of the process that runs now, and of no dead one."""
        with urllib.request.urlopen(f"http://{self.api}/metrics", timeout=10) as answer:
            found = set(re.findall(rf'process="{name}-[^"]*-(\d+)"', answer.read().decode()))
        return found == {str(self.pid(name))}

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
