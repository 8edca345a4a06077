"""A whole deployment for system tests: `bedplate up`, two lab hosts enrolled over SSH, the guest image, a network."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect

from controlplane.embedded import showcase
from controlplane.embedded.cleaning import processes_of
from controlplane.embedded.services import base_environment, python
from controlplane.embedded.stage import HOSTS, Stage
from controlplane.embedded.timeline import Timeline
from controlplane.embedded.valkey import Valkey
from provisioning.lab import Lab, LabHost

VMS = f"/v1/projects/{showcase.PROJECT}/vms"
EMBEDDING_MODEL = "all-minilm-l6-v2"
MIB = 1 << 20
SSH_OPTIONS = (
    "StrictHostKeyChecking=no",
    "UserKnownHostsFile=/dev/null",
    "BatchMode=yes",
    "LogLevel=ERROR",
)
Json = dict[str, Any]


@dataclass
class Deployed:
    """`login` and `ping` go from the lab host that does not run the VM."""

    stage: Stage
    lab: Lab
    key: Path
    keyed: set[str] = field(default_factory=set)
    connect_seconds: int = 5

    async def create(self, name: str, **changes: Any) -> Json:
        body = {
            "name": name,
            "image": showcase.IMAGE,
            "network": "default",
            "vcpus": 1,
            "memory_bytes": 384 * MIB,
            "ssh_keys": [self.key.with_suffix(".pub").read_text().strip()],
        }
        return await self.stage.api.post(VMS, body | changes)

    async def act(self, name: str, action: str, body: Json | None = None) -> None:
        await self.stage.api.post(f"{VMS}/{name}/{action}", body)

    async def until(self, name: str, status: str, seconds: float = 180) -> Json:
        """Until the VM's status is this; a failed one fails the test at once."""

        def is_there(vm: Json) -> bool:
            assert vm["status"] != "failed" or status == "failed", vm["conditions"]
            return vm["status"] == status

        return await self.stage.api.until(f"{VMS}/{name}", is_there, seconds=seconds)

    async def delete(self, name: str, seconds: float = 120) -> None:
        await self.stage.api.call("DELETE", f"{VMS}/{name}", missing_ok=True)
        deadline = time.monotonic() + seconds
        while await self.stage.api.call("GET", f"{VMS}/{name}", missing_ok=True):
            assert time.monotonic() < deadline, f"{name} is still there"
            await asyncio.sleep(0.3)

    def host_of(self, vm: Json) -> LabHost:
        return self.lab.host(vm["observed"]["host"])

    def other(self, vm: Json) -> LabHost:
        return self.lab.host(next(name for name in HOSTS if name != vm["observed"]["host"]))

    async def ping(self, vm: Json) -> None:
        """Over IPv4 and IPv6."""
        for address in (vm["ipv4"], vm["ipv6"]):
            argv = ["timeout", "20", "ping", "-c", "2", "-i", "0.3", "-w", "15", address]
            await asyncio.to_thread(self.other(vm).exec, argv, timeout=30)

    async def login(self, vm: Json, command: str, seconds: float = 120) -> str:
        """The output of a command run over SSH in the VM, as soon as it lets us in."""
        host = self.other(vm)
        if host.name not in self.keyed:
            write = ["sh", "-c", "umask 077; cat >/root/vm-key"]
            await asyncio.to_thread(host.exec, write, stdin=self.key.read_bytes())
            self.keyed.add(host.name)
        flags = [word for option in (*SSH_OPTIONS, f"ConnectTimeout={self.connect_seconds}") for word in ("-o", option)]
        place = f"{vm['user']}@{vm['ipv4']}"
        argv = ["timeout", "40", "ssh", "-F", "none", "-i", "/root/vm-key", *flags, place, command]
        deadline = time.monotonic() + seconds
        while True:
            done = await asyncio.to_thread(host.exec, argv, check=False, timeout=60)
            if done.returncode == 0:
                return done.stdout.decode()
            assert time.monotonic() < deadline, f"no login to {place}: {done.stderr.decode(errors='replace')}"
            await asyncio.sleep(0.5)

    async def boot_of(self, vm: Json, seconds: float = 120) -> str:
        return (await self.login(vm, "cat /proc/sys/kernel/random/boot_id", seconds)).strip()

    async def another_boot(self, vm: Json, before: str, seconds: float = 180) -> str:
        deadline = time.monotonic() + seconds
        while (found := await self.boot_of(vm, seconds)) == before:
            assert time.monotonic() < deadline, "the guest was not booted again"
            await asyncio.sleep(1)
        return found

    def cli_environment(self) -> dict[str, str]:
        return base_environment() | {
            "BEDPLATE_URL": self.stage.api_url,
            "BEDPLATE_TOKEN": self.stage.token_file.read_text().strip(),
            "BEDPLATE_PROJECT": showcase.PROJECT,
        }

    async def cli(self, *arguments: str, seconds: float = 90) -> str:
        """What `bedplate …` prints, as the operator."""
        process = await asyncio.create_subprocess_exec(
            *python("controlplane.cli.main", *arguments),
            env=self.cli_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(seconds):
                output, words = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == 0, words.decode(errors="replace")
        return output.decode(errors="replace")

    async def console(self, vm: Json, typed: bytes, expected: bytes) -> None:
        """Type on the serial console until the answer has `expected` in it."""
        headers = {"authorization": f"Bearer {self.stage.token_file.read_text().strip()}"}
        url = f"ws{self.stage.api_url.removeprefix('http')}{VMS}/{vm['name']}/console"
        seen = b""
        async with asyncio.timeout(60), connect(url, additional_headers=headers, proxy=None) as socket:
            while expected not in seen:
                await socket.send(typed)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(3):
                        while expected not in seen:
                            message = await socket.recv()
                            seen += message if isinstance(message, bytes) else message.encode()

    def pid(self, process: str) -> int:
        """Of a process of `up`, as its last line of status says."""
        words = (self.stage.directory / "up.log").read_text()
        found = re.findall(rf"\b{process}\b[^\n]*\(pid (\d+)\)", words)
        assert found, f"no pid of {process} in:\n{words[-2000:]}"
        return int(found[-1])

    async def kill(self, process: str) -> None:
        """SIGKILL, and wait until the supervisor has started it again."""
        old = self.pid(process)
        os.kill(old, signal.SIGKILL)
        await eventually(lambda: self.pid(process) != old, f"{process} started again", 60)

    async def flush_redis(self) -> None:
        reader, writer = await asyncio.open_unix_connection(str(Valkey(directory=self.stage.state_directory / "valkey").socket))
        writer.write(b"FLUSHALL\r\n")
        assert await reader.readline() == b"+OK\r\n"
        writer.close()
        await writer.wait_closed()

    def on_host(self, host: LabHost, vm: Json) -> list[str]:
        """What of the VM is left on a host: processes, links, routes, files."""
        found = host.exec(["sh", "-c", "ps -eo args; ip -o link; ip route; ip -6 route; find /var/lib/bedplate"], timeout=30)
        needles = {vm["id"], vm["ipv4"], vm["ipv6"], vm["root_volume_id"], *(nic["id"] for nic in vm["nics"])}
        lines = found.stdout.decode(errors="replace").splitlines()
        return [line for line in lines if any(needle in line for needle in needles) and "tombstone" not in line]


async def eventually(is_so: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.1)


async def _with_guests(stage: Stage) -> Lab:
    lab, image = await showcase._prepare(stage)
    await showcase.enrol(stage, lab)
    await showcase.import_image(stage, image)
    await showcase.make_project(stage)
    return lab


async def _with_model(stage: Stage) -> Lab:
    lab, image = await showcase._prepare(stage)
    await showcase.enrol(stage, lab)
    models = (showcase.import_model(stage, name) for name in (showcase.MODEL, EMBEDDING_MODEL))
    await showcase.gather(showcase.import_image(stage, image), *models)
    await showcase.make_project(stage)
    return lab


def deploy() -> AbstractAsyncContextManager[Deployed]:
    """Everything that VMs need, on free ports and in a directory of its own; nothing is left afterwards."""
    return _deployed(_with_guests)


def deploy_inference() -> AbstractAsyncContextManager[Deployed]:
    """The same with two models that were imported."""
    return _deployed(_with_model)


@asynccontextmanager
async def _deployed(prepare: Callable[[Stage], Awaitable[Lab]]) -> AsyncIterator[Deployed]:
    directory = Path(tempfile.mkdtemp(prefix="bedplate-vmt-"))
    directory.chmod(0o711)
    stage = Stage(directory=directory, timeline=Timeline())
    key = directory / "vm-key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(key)], check=True)
    try:
        lab = await prepare(stage)
        yield Deployed(stage=stage, lab=lab, key=key)
    finally:
        keep = Path(os.environ.get("KEEP_TEST_LOGS", directory / "nowhere"))
        if keep.is_dir():
            shutil.copytree(stage.log_directory, keep / directory.name, dirs_exist_ok=True)
        await stage.close()
        if stage.lab is not None:
            await asyncio.to_thread(stage.lab.clean)
        for pid in processes_of(directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
