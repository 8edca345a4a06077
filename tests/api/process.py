"""The API as a process of its own, and what reads its event streams."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 30


@dataclass
class Process:
    """One API process on its own state directory and port."""

    directory: Path
    database_url: str
    environment: dict[str, str]
    process: subprocess.Popen | None = None
    port: int = 0

    def start(self, **more: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BEDPLATE_")}
        environment |= {
            "BEDPLATE_CONFIG": str(self.directory / "none.toml"),
            "BEDPLATE_STATE_DIR": str(self.directory / "state"),
            "BEDPLATE_DATABASE__URL": self.database_url,
            "BEDPLATE_API__LISTEN": f"127.0.0.1:{self.port}",
            **self.environment,
            **more,
        }
        log = (self.directory / "api.log").open("w")
        argv = [sys.executable, "-P", "-m", "controlplane.api"]
        environment["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, cwd="/", stdin=subprocess.DEVNULL)
        log.close()

    @property
    def words(self) -> str:
        return (self.directory / "api.log").read_text()

    @property
    def token(self) -> str:
        return (self.directory / "state/operator-token").read_text().strip()

    async def ready(self, client: httpx2.AsyncClient) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx2.TransportError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
        pytest.fail(f"the API did not start:\n{self.words}")

    async def ended(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), PATIENCE_SECONDS)


def client_of(process: Process, scheme: str = "http", **options) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"{scheme}://127.0.0.1:{process.port}", timeout=10, **options)


class Stream:
    """Reads server-sent events one by one."""

    def __init__(self, response) -> None:
        self.lines = response.aiter_lines()

    async def next(self) -> dict:
        found = {}
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for line in self.lines:
                if not line and "data" in found:
                    return found
                name, _, value = line.partition(": ")
                if name in {"id", "event", "data"}:
                    found[name] = value
        return found
