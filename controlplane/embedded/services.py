"""The table of processes that make a single-machine deployment.

The one rule: children are told nothing secret; they get settings by environment and find keys and tokens by path.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import asyncpg

import controlplane
from controlplane.embedded.postgres import Postgres, PostgresFailed, system_user
from controlplane.embedded.state import StateDirectory
from controlplane.embedded.supervisor import Service
from controlplane.embedded.valkey import Valkey
from controlplane.settings import Settings, TlsSettings

_OLD_SERVER_SECONDS = 30.0
DATABASE = "bedplate"


def python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", module, *arguments)


def base_environment() -> dict[str, str]:
    """The caller's environment, with which `python` finds our packages also where they are not installed."""
    place = str(Path(next(iter(controlplane.__path__))).parent)
    return {**os.environ, "PYTHONPATH": place, "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What `up` runs, from settings."""

    settings: Settings
    state: StateDirectory

    @property
    def postgres(self) -> Postgres | None:
        """The embedded server; None when settings name one by URL."""
        return None if self.settings.database.url else Postgres(directory=self.state.path / "postgres")

    @property
    def valkey(self) -> Valkey | None:
        return None if self.settings.redis.url else Valkey(directory=self.state.path / "valkey")

    @property
    def api_url(self) -> str:
        return _url(self.settings.api.listen, self.settings.tls_of(self.settings.api.tls))

    @property
    def gateway_url(self) -> str:
        return _url(self.settings.gateway.listen, self.settings.tls_of(self.settings.gateway.tls))

    def environment(self) -> dict[str, str]:
        """What every child of ours gets besides the caller's environment."""
        embedded: dict[str, str] = {"BEDPLATE_STATE_DIR": str(self.state.path)}
        if self.postgres is not None:
            embedded["BEDPLATE_DATABASE__URL"] = self.postgres.url(DATABASE)
        if self.valkey is not None:
            embedded["BEDPLATE_REDIS__URL"] = self.valkey.url
        return base_environment() | embedded

    def stores(self) -> list[Service]:
        services: list[Service] = []
        if (postgres := self.postgres) is not None:
            services.append(_postgres_service(postgres))
        if (valkey := self.valkey) is not None:
            services.append(
                Service(
                    name="valkey",
                    argv=tuple(valkey.argv()),
                    environment=valkey.environment(),
                    prepare=valkey.prepare,
                    is_ready=valkey.is_ready,
                    ready_seconds=30,
                )
            )
        return services

    def preparations(self) -> list[tuple[str, tuple[str, ...]]]:
        """What runs to its end between the stores and the programs."""
        return [("migrate", python("controlplane.migrate"))]

    def programs(self) -> list[Service]:
        """Our own processes; the first to stop is the last here."""
        api, gateway = self.settings.api, self.settings.gateway
        return [
            self._program("api", is_ready=answers(api.listen, self.settings.tls_of(api.tls), "/readyz")),
            *(self._program(name, "controlplane.worker") for name in self._worker_names()),
            self._program("beat", "controlplane.worker.beat"),
            self._program("watch"),
            self._program("gateway", is_ready=answers(gateway.listen, self.settings.tls_of(gateway.tls), "/healthz")),
        ]

    def _worker_names(self) -> list[str]:
        count = self.settings.worker.processes
        return ["worker"] if count == 1 else [f"worker{number}" for number in range(1, count + 1)]

    def _program(
        self,
        name: str,
        module: str = "",
        *,
        is_ready: Callable[[], Coroutine[None, None, bool]] | None = None,
    ) -> Service:
        return Service(
            name=name,
            argv=python(module or f"controlplane.{name}"),
            environment=self.environment(),
            is_ready=is_ready,
            stop_seconds=20,
        )

    async def make_database(self) -> None:
        """Make the embedded server's database when it is missing."""
        if (postgres := self.postgres) is None:
            return
        connection = await asyncpg.connect(postgres.url("postgres"))
        try:
            if not await connection.fetchval("SELECT 1 FROM pg_database WHERE datname = $1", DATABASE):
                await connection.execute(f'CREATE DATABASE "{DATABASE}"')
        finally:
            await connection.close()


def _postgres_service(postgres: Postgres) -> Service:
    def prepare() -> None:
        """A server left by a supervisor that was killed gets time to end; two servers never share a cluster."""
        deadline = time.monotonic() + _OLD_SERVER_SECONDS
        while (pid := postgres.pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            if time.monotonic() > deadline:
                raise PostgresFailed(f"an earlier PostgreSQL (pid {pid}) on {postgres.data_directory} does not end")
            time.sleep(0.2)
        postgres.prepare()

    async def is_ready() -> bool:
        argv = (str(postgres.bin_directory / "pg_isready"), "-q", "-h", str(postgres.run_directory), "-d", "postgres")
        process = await asyncio.create_subprocess_exec(*argv, env=postgres.environment())
        return await process.wait() == 0

    return Service(
        name="postgres",
        argv=tuple(postgres.argv()),
        environment=postgres.environment(),
        prepare=prepare,
        is_ready=is_ready,
        stop_signal=signal.SIGINT,  # fast shutdown
        stop_seconds=30,
        death_signal=signal.SIGINT,
        account=system_user(),
    )


def _url(listen: str, tls: TlsSettings) -> str:
    return f"{'https' if tls.certificate else 'http'}://{listen}"


def answers(listen: str, tls: TlsSettings, path: str) -> Callable[[], Coroutine[None, None, bool]]:
    """A check: whether the listener answers 200 to GET `path` within two seconds. The certificate is not judged here."""
    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "[::]": "::1", "": "127.0.0.1"}.get(host, host.strip("[]"))
    context = None
    if tls.certificate is not None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE

    async def check() -> bool:
        with contextlib.suppress(OSError, TimeoutError, ssl.SSLError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
                try:
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
                    return (await reader.readline()).split(b" ")[1:2] == [b"200"]
                finally:
                    writer.close()
        return False

    return check
