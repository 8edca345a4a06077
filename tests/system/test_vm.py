"""Real VMs through the whole product: API, kernel, SSH to lab hosts, agent, QEMU, routes, SSH into the guest."""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from controlplane.embedded import showcase
from controlplane.embedded.postgres import Postgres
from controlplane.embedded.services import python
from tests.system import planted, volumes
from tests.system.deployment import MIB, VMS, Deployed, Json, deploy, eventually
from tests.system.terminal import opened

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "debootstrap"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed() -> AsyncIterator[Deployed]:
    async with deploy() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def vm(deployed: Deployed) -> AsyncIterator[Json]:
    """One that runs and lets us in."""
    await deployed.create("web")
    vm = await deployed.until("web", "running")
    await deployed.login(vm, "true")
    yield vm
    await deployed.delete("web")


async def test_pinged_over_both_families_logged_in_and_deleted_without_a_trace(deployed: Deployed) -> None:
    await deployed.create("first", user_data="#!/bin/sh\necho planted > /var/tmp/planted\n")
    vm = await deployed.until("first", "running")
    assert (await deployed.login(vm, "hostname; cat /var/tmp/planted")).split() == ["first", "planted"]
    await deployed.ping(vm)
    here, other = deployed.host_of(vm), deployed.other(vm)
    assert deployed.on_host(here, vm)
    assert deployed.on_host(other, vm), "its routes"
    await deployed.delete("first")
    assert deployed.on_host(here, vm) == []
    await eventually(lambda: deployed.on_host(other, vm) == [], "routes gone from the other host", 90)


async def test_stopped_started_restarted_resized(deployed: Deployed, vm: Json) -> None:
    boot = await deployed.boot_of(vm)
    await deployed.act("web", "restart")
    boot = await deployed.another_boot(vm, boot)
    await deployed.act("web", "stop")
    await deployed.until("web", "stopped")
    await deployed.act("web", "resize", {"memory_bytes": 512 * MIB})
    await deployed.act("web", "start")
    vm = await deployed.until("web", "running")
    assert await deployed.another_boot(vm, boot)
    total = await deployed.login(vm, "awk '/MemTotal/ {print $2}' /proc/meminfo")
    assert 400 * 1024 < int(total) <= 512 * 1024


async def test_a_killed_machine_comes_back_by_the_agent_alone(deployed: Deployed, vm: Json) -> None:
    boot = await deployed.boot_of(vm)
    killed = await asyncio.to_thread(deployed.host_of(vm).exec, ["pkill", "-9", "-f", f"qemu-system.*{vm['id']}"])
    assert killed.returncode == 0
    await deployed.another_boot(vm, boot)
    await deployed.until("web", "running")


async def test_a_killed_agent_leaves_the_machine_alone_and_finds_it_again(deployed: Deployed, vm: Json) -> None:
    boot = await deployed.boot_of(vm)
    await asyncio.to_thread(deployed.host_of(vm).exec, ["pkill", "-9", "-f", "agent.*serve"])
    assert await deployed.boot_of(vm) == boot
    await deployed.act("web", "restart")
    await deployed.another_boot(vm, boot)
    await deployed.until("web", "running")


async def test_a_host_reboot_brings_the_machine_back(deployed: Deployed, vm: Json) -> None:
    boot = await deployed.boot_of(vm)
    await asyncio.to_thread(deployed.host_of(vm).reboot)
    await deployed.another_boot(vm, boot, seconds=240)
    await deployed.until("web", "running")
    await deployed.ping(vm)


async def test_what_a_guest_wrote_into_its_volumes_stays_and_is_readable_nowhere_else(deployed: Deployed) -> None:
    await volumes.stays_through_everything(deployed)


@pytest.mark.parametrize("fault", ["worker", "postgres", "valkey", "flush", "api"])
async def test_a_vm_is_made_whatever_of_the_control_plane_dies(deployed: Deployed, fault: str) -> None:
    name = f"chaos-{fault}"
    await deployed.create(name)
    await asyncio.sleep(0.2)  # into the middle of its steps
    if fault == "flush":
        await deployed.flush_redis()
    else:
        await deployed.kill(fault)
    await _answers(deployed)
    vm = await deployed.until(name, "running", seconds=240)
    assert (await deployed.login(vm, "hostname")).strip() == name
    if fault == "flush":
        await deployed.flush_redis()
    else:
        await deployed.kill(fault)
    await _answers(deployed)
    here = deployed.host_of(vm)
    await deployed.delete(name, seconds=180)
    assert deployed.on_host(here, vm) == []


async def test_log_console_and_login_from_outside_through_the_control_plane(deployed: Deployed, vm: Json) -> None:
    """`bedplate vm logs|console|ssh` on a machine that has no route to the VM."""
    log = await deployed.cli("vm", "logs", "web", "--tail", "1M")
    assert "web login:" in log
    answer = await deployed.cli("vm", "ssh", "web", "-i", str(deployed.key), "-o", "UserKnownHostsFile=/dev/null", "hostname")
    assert answer.split()[-1] == "web"
    await deployed.console(vm, b"\n", b"login:")


async def test_a_person_works_at_the_console(deployed: Deployed, vm: Json) -> None:
    """`bedplate vm console` at a real terminal: the prompt, a login, a command and its output, and the key that leaves."""
    await deployed.login(vm, f"echo {vm['user']}:typed | sudo -n chpasswd")
    await asyncio.to_thread(_at_the_console, deployed, vm)


def _at_the_console(deployed: Deployed, vm: Json) -> None:
    with opened(python("controlplane.cli.main", "vm", "console", vm["name"]), deployed.cli_environment()) as terminal:
        before = terminal.modes()
        terminal.expect(b"Ctrl-] leaves")
        terminal.insist(b"\r", b"web login:")
        assert terminal.modes() != before, "raw: Ctrl-C goes to the guest"
        terminal.type(vm["user"].encode() + b"\r")
        terminal.expect(b"Password:")
        terminal.type(b"typed\r")
        terminal.insist(b"\r", b"web:~$ ")
        terminal.type(b"echo $((6 * 7))-$(hostname); sed -u s/^/said-/\r")
        terminal.expect(b"42-web\r")
        terminal.insist(b"it\r", b"said-it")
        terminal.type(b"\x03")
        terminal.expect(b"web:~$ ")
        terminal.type(b"exit\r")
        terminal.expect(b"logout")
        terminal.insist(b"\r", b"web login:")
        terminal.type(b"\x1d")
        assert terminal.process.wait(20) == 0
        assert terminal.modes() == before, "as it was found"


async def _answers(deployed: Deployed) -> None:
    """The API answers again."""
    async with asyncio.timeout(60):
        while True:
            try:
                await deployed.stage.api.get(VMS)
            except Exception:
                await asyncio.sleep(0.2)
            else:
                return


async def test_planted_secrets_are_found_in_no_log_process_file_or_table(deployed: Deployed, tmp_path: Path) -> None:
    """Everything secret that a deployment is given or makes, looked for while a machine with a secret runs.

    Long, because each secret is planted by another way in, and all are looked for at once.
    """
    stage, project = deployed.stage, f"/v1/projects/{showcase.PROJECT}"
    identity = tmp_path / "identity"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "planted", "-f", str(identity)], check=True)
    word = f"planted-{uuid.uuid4().hex}"
    secrets = {"user data": word.encode(), "identity": identity.read_bytes().splitlines()[2]}
    headers = {"authorization": f"Bearer {stage.token_file.read_text().strip()}"}
    async with httpx2.AsyncClient(base_url=stage.api_url, headers=headers, timeout=60, trust_env=False) as client:
        for name, path, body in (
            ("token", "/v1/tokens", {"name": "planted", "role": "member", "project": showcase.PROJECT}),
            ("key", f"{project}/keys", {"name": "planted"}),
        ):
            made = await client.post(path, json=body, headers={"idempotency-key": f"planted-{name}"})
            assert made.status_code == 201, made.text
            secrets[name] = made.json()["secret"].encode()
        wrong = await client.get("/v1/projects", headers={"authorization": f"Bearer {word}"})
        assert wrong.status_code == 401, "a wrong token is a secret too: somebody's, of somewhere else"
        host = deployed.lab.hosts[0]
        await asyncio.to_thread(host.authorize, identity.with_suffix(".pub").read_text())
        body = {"address": host.address, "port": host.port, "user": "root", "identity": identity.read_text()}
        await client.post("/v1/hosts/preflight", json=body)
    await deployed.create("planted", user_data=f"#!/bin/sh\necho {word} >/root/planted\n")
    vm = await deployed.until("planted", "running")
    await deployed.login(vm, "true")

    state = stage.state_directory
    master, operator = (state / "master.key").read_bytes(), stage.token_file.read_text().strip()
    homes = frozenset({state / "master.key", stage.token_file})
    assert {path.stat().st_mode & 0o777 for path in homes} == {0o600}
    secrets |= {"master key": master.strip(), "operator token": operator.encode()}
    wanted = planted.needles(secrets)
    database = Postgres(directory=state / "postgres").url()
    in_rows, size = await planted.in_database(database, wanted | {b"PRIVATE KEY": "a private key"})
    assert size > 10_000, "the database was read"
    found = in_rows + planted.in_processes(stage.directory, wanted)
    found += await asyncio.to_thread(planted.in_files, state, wanted | {b"PRIVATE KEY": "a private key"}, homes=homes)
    found += await asyncio.to_thread(planted.in_files, stage.directory / "lab", wanted)
    found += [f"{name} in up.log" for form, name in wanted.items() if form in (stage.directory / "up.log").read_bytes()]
    assert found == []
    await deployed.delete("planted")
