"""API and worker in the test's own process, over a real database and real SSH; and how to see what a host has become."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
from fastapi import FastAPI

from controlplane.api.app import create_app
from controlplane.authz.service import Role
from controlplane.core.clock import SystemClock
from controlplane.core.sealing import Sealer
from controlplane.identity.service import new_token
from controlplane.kernel.database import Database
from controlplane.kernel.publish import Publisher
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.world import World
from controlplane.remote.access import RowDirectory
from controlplane.remote.ssh import SshLinks
from controlplane.resources.host.program import HostPreflightProgram, HostProgram
from controlplane.settings import Settings
from provisioning.lab import LabHost

SNAPSHOT = """
import hashlib, json, os, pathlib, subprocess
IGNORED = ("/run/init", "/run/mount", "/var/lib/dpkg/", "/var/lib/apt/")
found = {}
for top in ("/etc", "/opt", "/root", "/home", "/usr/local", "/lib/systemd/system", "/var/lib", "/var/log", "/run"):
    for path in pathlib.Path(top).rglob("*"):
        name = str(path)
        if name.startswith(IGNORED) or "__pycache__" in name or name.endswith(".log"):
            continue
        if path.is_symlink():
            found[name] = "-> " + os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() + oct(path.stat().st_mode)
        elif path.is_dir():
            found[name] = "directory " + oct(path.stat().st_mode)
for name in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
    found["sysctl " + name] = pathlib.Path("/proc/sys/" + name.replace(".", "/")).read_text().strip()
for name, argv in (("nft", ["nft", "list", "ruleset"]), ("packages", ["dpkg-query", "-W"]), ("links", ["ip", "-br", "link"]),
                   ("routes", ["ip", "route", "show", "table", "all"]), ("rules", ["ip", "rule"]),
                   ("mounts", ["cat", "/proc/mounts"]), ("cgroups", ["find", "/sys/fs/cgroup", "-type", "d"]),
                   ("processes", ["ps", "-eo", "comm"])):
    text = subprocess.run(argv, capture_output=True, text=True).stdout
    lines = {line for line in text.split("\\n") if "proto kernel" not in line}
    found[name] = sorted(lines - {"ps", "nsenter", "python3", "sshd"})
print(json.dumps(found))
"""


def snapshot(host: LabHost) -> dict[str, Any]:
    """All of a host that enrolment could touch."""
    return json.loads(host.exec(["python3", "-c", SNAPSHOT], timeout=60).stdout)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name)
    }


class ShiftedClock(SystemClock):
    """A control plane that goes wrong by `by`, which to it looks like a host that does."""

    def __init__(self) -> None:
        self.by = timedelta()

    def now(self) -> datetime:
        return super().now() + self.by


class Nudged(Publisher):
    """Every nudge goes to the runner of this process."""

    runner: Runner | None = None

    def due(self, run_id: str, shard: int) -> None:
        del shard
        if self.runner is not None:
            self.runner.submit(run_id)


@dataclass
class Deployment:
    """API and worker in this process, over a real database."""

    client: httpx2.AsyncClient
    database: Database
    runner: Runner
    app: FastAPI
    clock: ShiftedClock
    patience_seconds: int = 200

    def pause(self) -> None:
        """From now on nobody works on what is asked for; a test does."""
        assert isinstance(self.database.publisher, Nudged)
        self.database.publisher.runner = None

    async def get(self, path: str) -> Any:
        answer = await self.client.get(path)
        answer.raise_for_status()
        return answer.json()

    async def bootstrap(self, host: LabHost) -> None:
        """What an operator does on a new host."""
        host.authorize((await self.get("/v1/hosts/bootstrap-key"))["public_key"])

    def body(self, host: LabHost, **more: Any) -> dict[str, Any]:
        return {"address": host.address, "port": host.port, **more}

    async def preflight(self, host: LabHost, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The operation's end, and what was found."""
        answer = await self.client.post("/v1/hosts/preflight", json=self.body(host, **more))
        assert answer.status_code == 202, answer.text
        operation = await self.ended(answer.headers["x-operation-id"])
        return operation, await self.get(f"/v1/hosts/preflights/{answer.json()['id']}")

    async def add(self, host: LabHost, name: str = "", **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        body = self.body(host, name=name or host.name, **{"host_key_fingerprint": fingerprint(host), **more})
        answer = await self.client.post("/v1/hosts", json=body)
        assert answer.status_code == 201, answer.text
        operation = await self.ended(answer.headers["x-operation-id"])
        return operation, await self.get(f"/v1/hosts/{answer.json()['id']}")

    async def remove(self, name: str) -> dict[str, Any]:
        answer = await self.client.delete(f"/v1/hosts/{name}")
        assert answer.status_code == 202, answer.text
        return await self.ended(answer.headers["x-operation-id"])

    async def ended(self, operation_id: str) -> dict[str, Any]:
        operation: dict[str, Any] = {}
        for _ in range(self.patience_seconds // 10):
            operation = await self.get(f"/v1/operations/{operation_id}?wait=10s")
            if operation["state"] != "running":
                return operation
        raise AssertionError(operation)


def fingerprint(host: LabHost) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", "-"], input=host.host_key.encode(), capture_output=True, check=True)
    return done.stdout.split()[1].decode()


@contextlib.asynccontextmanager
async def open_deployment(database_url: str, state_dir: Path) -> AsyncIterator[Deployment]:
    publisher, sealer, clock = Nudged(), Sealer(bytes(32)), ShiftedClock()
    database = await Database.open(database_url, publisher=publisher)
    settings = Settings(state_dir=state_dir)
    async with database.sessionmaker.begin() as session:
        token = new_token(name="operator", role=Role.OPERATOR)
        session.add(token.row)
    app = create_app(settings, database, sealer=sealer)
    links = SshLinks(RowDirectory(database.pool, sealer))
    world = World(database=database, hosts=links, clock=clock, settings=settings, sealer=sealer)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(database.close)
        stack.push_async_callback(links.close)
        runner = await stack.enter_async_context(Runner(world=world, registry=Registry([HostProgram, HostPreflightProgram])))
        publisher.runner = runner
        client = await stack.enter_async_context(
            httpx2.AsyncClient(
                transport=httpx2.ASGITransport(app=app),
                base_url="http://api.test",
                headers={"authorization": f"Bearer {token.secret}"},
                timeout=120,
            )
        )
        yield Deployment(client=client, database=database, runner=runner, app=app, clock=clock)


async def eventually(condition: Callable[[], Any], explain: Callable[[], Any] = lambda: "", seconds: float = 30) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while True:
        result = condition()
        if isinstance(result, Awaitable):
            result = await result
        if result:
            return
        assert loop.time() < end, explain()
        await asyncio.sleep(0.2)
