"""A Valkey server for tests, on a socket of its own, that may be killed and started again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from controlplane.embedded.valkey import Valkey


class ValkeyServer:
    """`url` stays the same over starts; what was held is kept by its append-only file unless `forget` is asked for."""

    def __init__(self, directory: Path) -> None:
        self.valkey = Valkey(directory=directory)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.valkey.url

    async def start(self) -> None:
        self.valkey.prepare()
        self._process = subprocess.Popen(self.valkey.argv(), stdout=subprocess.DEVNULL, env=self.valkey.environment())
        async with asyncio.timeout(20):
            while not await self.valkey.is_ready():
                await asyncio.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None


@contextlib.contextmanager
def valkey_server() -> Iterator[ValkeyServer]:
    with tempfile.TemporaryDirectory(prefix="bedplate-vk-") as directory:
        server = ValkeyServer(Path(directory))
        try:
            yield server
        finally:
            server.kill()
