"""Enrolment on real lab hosts: looked at, added, repaired, refused for every good reason, and removed without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

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
from controlplane.remote.link import HostUnreachable
from controlplane.remote.ssh import SshLinks
from controlplane.resources.host.program import HostPreflightProgram, HostProgram
from controlplane.settings import Settings
from provisioning.host import zipapp
from provisioning.lab import HostSpec, Lab, LabHost

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.caps("root", "netns", "sshd"), pytest.mark.timeout(300)]

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
                   ("routes", ["ip", "route", "show", "table", "all"]), ("processes", ["ps", "-eo", "comm"])):
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
    lab: Lab

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
        for _ in range(20):
            operation = await self.get(f"/v1/operations/{operation_id}?wait=10s")
            if operation["state"] != "running":
                return operation
        raise AssertionError(operation)


def fingerprint(host: LabHost) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", "-"], input=host.host_key.encode(), capture_output=True, check=True)
    return done.stdout.split()[1].decode()


@pytest.fixture
async def deployment(database_url: str, lab: Lab, tmp_path: Path) -> AsyncIterator[Deployment]:
    publisher, sealer = Nudged(), Sealer(bytes(32))
    database = await Database.open(database_url, publisher=publisher)
    settings = Settings(state_dir=tmp_path)
    async with database.sessionmaker.begin() as session:
        token = new_token(name="operator", role=Role.OPERATOR)
        session.add(token.row)
    app = create_app(settings, database, sealer=sealer)
    links = SshLinks(RowDirectory(database.pool, sealer))
    world = World(database=database, hosts=links, clock=SystemClock(), settings=settings, sealer=sealer)
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
        yield Deployment(client=client, database=database, runner=runner, lab=lab)


@pytest.fixture
def host(fresh_directory: Path) -> Any:
    """A host that nobody has enrolled."""
    with Lab("enrol", fresh_directory, (HostSpec(name="h", cores=1, memory_bytes=3 << 30),)) as lab:
        yield lab.host("h")


async def test_a_host_is_added_repaired_and_removed_without_a_trace(deployment: Deployment, host: LabHost) -> None:
    before = snapshot(host)
    await deployment.bootstrap(host)
    enrolled_before = snapshot(host)

    operation, found = await deployment.preflight(host)
    assert operation["state"] == "succeeded", operation
    assert found["fingerprint"] == fingerprint(host)
    assert found["report"]["is_fit"], found["report"]["checks"]
    planned = {(change["kind"], change["subject"]) for change in found["changes"]}
    assert ("user", "bedplate") in planned
    assert difference(enrolled_before, snapshot(host)) == {}, "preflight reads only"

    operation, added = await deployment.add(host, labels={"rack": "1"}, location="here")
    assert operation["state"] == "succeeded", operation
    assert added["state"] == "ready"
    assert {(change["kind"], change["subject"]) for change in added["changes"]} == planned, "the dry run tells the truth"
    assert added["observed"]["agent_version"] == zipapp.build().version
    assert added["observed"]["allocatable"] == {"vcpus": 1, "memory_bytes": 3 << 30}
    assert added["observed"]["data_ipv4"] == host.data_address
    facts = (await deployment.get("/v1/hosts/h/inventory"))["facts"]
    assert facts["hostname"] == "h"
    assert facts["cpus"]
    assert {condition["type"] for condition in added["conditions"]} >= {"Ready"}
    assert host.exec(["id", "bedplate"]).returncode == 0

    host.exec(["sh", "-c", "rm -rf /opt/bedplate/agent/current; userdel --force bedplate"])
    operation, repaired = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    assert repaired["id"] == added["id"]
    assert repaired["generation"] == 2
    assert host.exec(["id", "bedplate"]).returncode == 0

    assert (await deployment.remove("h"))["state"] == "succeeded"
    assert (await deployment.client.get("/v1/hosts/h")).status_code == 404
    await eventually(
        lambda: difference(enrolled_before, snapshot(host)) == {}, lambda: difference(enrolled_before, snapshot(host))
    )
    (host.disk / "root/.ssh/authorized_keys").write_text((host.lab.directory / "ssh/id_ed25519.pub").read_text())
    assert difference(before, snapshot(host)) == {}


async def test_an_enrolled_host_survives_a_reboot(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    _, added = await deployment.add(host)
    boot = (await deployment.get("/v1/hosts/h/inventory"))["facts"]["boot_id"]
    await asyncio.to_thread(host.reboot)
    links = deployment.runner.world.hosts

    async def answers() -> bool:
        try:
            return (await links.facts(added["id"])).boot_id != boot
        except HostUnreachable:
            return False

    await eventually(answers)


async def incidents(deployment: Deployment, subject: str) -> dict[str, str]:
    """Open incidents of a subject: code to words."""
    items = (await deployment.get("/v1/incidents?limit=100"))["items"]
    return {item["code"]: item["detail"] for item in items if item["subject"] == subject and item["resolved_at"] is None}


async def test_every_refusal_says_which_step_failed_and_why(deployment: Deployment, host: LabHost) -> None:
    """No key there; another host key; nobody listens; then the same host is added after all."""
    operation, found = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.login_refused")
    assert "does not let root in" in operation["error_detail"]
    assert "host.login_refused" in await incidents(deployment, found["id"])

    await deployment.bootstrap(host)
    operation, _ = await deployment.add(host, host_key_fingerprint="SHA256:" + "A" * 43)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.key_mismatch")
    assert fingerprint(host) in operation["error_detail"]
    operation, _ = await deployment.preflight(host, host_key_fingerprint="SHA256:" + "A" * 43)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.key_mismatch")

    host.exec(["sh", "-c", "mv /usr/bin/python3 /usr/bin/python3.away"])
    operation, _ = await deployment.add(host)
    assert operation["error_code"] == "host.python_missing"
    host.exec(["sh", "-c", "mv /usr/bin/python3.away /usr/bin/python3"])

    operation, added = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    assert added["id"] == found["id"]
    assert await incidents(deployment, found["id"]) == {}

    operation, _ = await deployment.preflight(host, port=1)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.unreachable")
    assert "refused" in operation["error_detail"]


async def test_artifacts_are_shipped_by_digest_and_a_missing_package_without_a_route_is_named(
    deployment: Deployment, host: LabHost
) -> None:
    await deployment.bootstrap(host)
    program = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + (62).to_bytes(2, "little") + b"x" * 100_000
    digest = hashlib.sha256(program).hexdigest()
    path = f"/v1/hosts/artifacts/cloud-hypervisor?sha256={digest}"
    answer = await deployment.client.put(path, content=program, headers={"content-type": "application/octet-stream"})
    assert answer.status_code == 200, answer.text

    host.exec(["dpkg", "--remove", "--force-depends", "zstd"])
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.install_failed"), operation
    assert "zstd" in operation["error_detail"]
    host.exec(["sh", "-c", "printf 'Package: zstd\\nStatus: install ok installed\\nVersion: 9\\n' >> /var/lib/dpkg/status"])
    operation, _ = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    shipped = f"/opt/bedplate/cloud-hypervisor/{digest}/cloud-hypervisor"
    assert host.exec(["sha256sum", shipped]).stdout.decode().startswith(digest)
    assert host.exec(["stat", "-c", "%a", shipped]).stdout == b"755\n"
    assert (await deployment.remove(added["name"]))["state"] == "succeeded"
    await eventually(lambda: host.exec(["test", "-e", "/opt/bedplate"], check=False).returncode == 1)


async def test_a_full_disk_half_way_is_named_and_removed_again(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    before = snapshot(host)
    host.exec(["sh", "-c", "mkdir /opt/bedplate && mount -t tmpfs -o size=64k tmpfs /opt/bedplate"])
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.disk_full"), operation
    assert "agent.pyz" in operation["error_detail"]
    assert added["state"] == "enrolling"
    assert {change["kind"] for change in added["changes"]} >= {"directory", "user"}
    assert (await incidents(deployment, added["id"])).keys() == {"host.disk_full"}
    host.exec(["umount", "/opt/bedplate"])
    host.exec(["rmdir", "/opt/bedplate"])
    assert (await deployment.remove("h"))["state"] == "succeeded"
    assert difference(before, snapshot(host)) == {}


async def test_a_machine_that_is_not_fit_is_refused_before_anything_changes(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    host.exec(["sh", "-c", "echo AllowUsers root >> /etc/ssh/sshd_config"])
    before = snapshot(host)
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.not_fit"), operation
    assert "AllowUsers" in operation["error_detail"]
    assert difference(before, snapshot(host)) == {}
    assert (await deployment.remove(added["name"]))["state"] == "succeeded"


async def test_an_uploaded_identity_is_used_once_and_kept_nowhere(
    deployment: Deployment, host: LabHost, tmp_path: Path
) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    public, private = (tmp_path / "key.pub").read_text().strip(), (tmp_path / "key").read_text()
    script = f"useradd -m -p '*' ops; mkdir ~ops/.ssh; echo '{public}' > ~ops/.ssh/authorized_keys; chown -R ops: ~ops/.ssh"
    host.exec(["sh", "-c", script])
    operation, _ = await deployment.add(host, user="ops", identity=private)
    assert operation["error_code"] == "host.not_fit", operation
    assert "root" in operation["error_detail"]
    host.authorize(public)
    operation, added = await deployment.add(host, identity=private)
    assert operation["state"] == "succeeded", operation
    row = await deployment.database.pool.fetchrow("SELECT * FROM host WHERE id = $1", added["id"])
    assert row["identity_sealed"] is None
    body = deployment.body(host, name="x", host_key_fingerprint=fingerprint(host), identity="no key")
    answer = await deployment.client.post("/v1/hosts", json=body)
    assert answer.json()["code"] == "host.identity_invalid"


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
