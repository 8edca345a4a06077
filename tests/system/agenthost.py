"""A lab host with the agent on it, spoken to over the agent's own socket: what the drivers do, without a control plane."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from hostagent.protocol import codec, frames
from hostagent.protocol.errors import AgentError
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.results import Failed, Outcome, Running, Succeeded
from hostagent.protocol.verbs import ANSWER, HostObserved, Nothing, StreamRequest, StreamTicket, Subject, UploadResult
from hostagent.protocol.wanted import Generation, ImageWanted, Observed, Purge
from provisioning.host import zipapp
from provisioning.lab import LabHost

READY_SECONDS = 30.0
LOOK_SECONDS = 0.1


class AgentHost:
    def __init__(self, host: LabHost) -> None:
        self.host = host

    def install(self) -> None:
        """The agent's file and its two units; they start with the host, and at once when it runs."""
        agent = zipapp.build().write(self.host.disk / "opt/bedplate/agent")
        inside = f"/{agent.relative_to(self.host.disk)}"
        units = self.host.root / "etc/bedplate/units.d"
        units.mkdir(exist_ok=True)
        for name, arguments in (("supervisor", ["supervise"]), ("agent", ["serve", "--interval", "0.5"])):
            unit = {"name": f"bedplate-{name}", "argv": ["/usr/bin/python3", inside, *arguments]}
            (units / f"{name}.json").write_text(json.dumps(unit))
        os.kill(self.host.pid, signal.SIGHUP)

    @property
    def socket(self) -> Path:
        return self.host.root / "run/bedplate/agent.sock"

    async def ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end:
            try:
                await self.observe()
            except (OSError, ConnectionError, TimeoutError, ValueError):
                await asyncio.sleep(LOOK_SECONDS)
            else:
                return
        log = self.host.disk / "var/log/units/bedplate-agent.log"
        raise AssertionError(f"the agent does not answer: {log.read_text()[-3000:] if log.exists() else 'no log'}")

    async def call(self, verb: str, body: object, *, seconds: float = 30.0) -> Any:
        answer = await self.answer(Request(id=1, verb=verb, deadline_ms=int(seconds * 1000), body=codec.encode(body)))
        if answer.error is not None:
            raise answer.error
        return codec.decode(ANSWER[verb], answer.body)

    async def answer(self, request: Request) -> Answer:
        """What the agent answers; one connection a request."""
        async with asyncio.timeout((request.deadline_ms or 30_000) / 1000 + 5):
            reader, writer = await asyncio.open_unix_connection(self.socket, limit=frames.MAX_LINE_BYTES)
            try:
                writer.write(b'{"face":"rpc"}\n' + frames.encode(request))
                await writer.drain()
                while True:
                    line = await reader.readline()
                    if not line:
                        raise ConnectionResetError("the agent closed the channel")
                    answer = frames.decode(line)
                    if isinstance(answer, Answer):
                        return answer
            finally:
                writer.close()

    async def ensure(self, kind: str, document: Any, *, seconds: float = 60.0) -> Succeeded:
        return await self._until_done(f"{kind}.ensure", document, seconds)

    async def purge(self, kind: str, object_id: str, generation: Generation, *, seconds: float = 60.0) -> Succeeded:
        return await self._until_done(f"{kind}.purge", Purge(id=object_id, generation=generation), seconds)

    async def _until_done(self, verb: str, body: object, seconds: float) -> Succeeded:
        end = time.monotonic() + seconds
        while True:
            outcome: Outcome = await self.call(verb, body)
            match outcome.result:
                case Succeeded() as done:
                    return done
                case Failed(retryable=True) | Running() if time.monotonic() < end:
                    await asyncio.sleep(LOOK_SECONDS)
                case other:
                    raise AssertionError(f"{verb}: {other}")

    async def observe(self) -> dict[tuple[str, str], Observed]:
        observed: HostObserved = await self.call("host.observe", Nothing())
        return {(item.kind, item.id): item for item in observed.objects}

    async def vm(self, vm_id: str) -> Observed:
        observed = (await self.call("vm.observe", Subject(id=vm_id))).object
        assert observed is not None
        return observed

    async def until_vm(self, vm_id: str, state: str, *, seconds: float, not_pid: int = 0) -> Observed:
        """Waits until the machine is in `state`, by another process than `not_pid`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            observed = await self.vm(vm_id)
            if observed.state == state and (not not_pid or observed.detail["pid"] not in (None, not_pid)):
                return observed
            await asyncio.sleep(LOOK_SECONDS)
        raise AssertionError(f"{vm_id} is not {state} after {seconds} s: {await self.vm(vm_id)}")

    async def put_image(self, image: ImageWanted, source: Path) -> None:
        """As if its files had been uploaded."""
        outcome: Outcome = await self.call("image.ensure", image)
        blobs = self.host.disk / "var/lib/bedplate/images/sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        for file in image.files if isinstance(outcome.result, Running) else ():
            target = blobs / file.sha256
            if not target.exists():
                subprocess.run(["cp", "--reflink=auto", "--sparse=always", str(source / file.name), str(target)], check=True)
                target.chmod(0o644)
        await self.ensure("image", image)

    async def open_stream(self, request: StreamRequest) -> Bytes:
        """As `dispatch` opens it, with a ticket."""
        return (await self._ticketed(request))[1]

    async def upload(self, sha256: str, content: bytes) -> None:
        ticket, stream = await self._ticketed(StreamRequest(kind="upload", sha256=sha256, size_bytes=len(content)))
        try:
            await stream.write(content[ticket.offset :])
            await stream.write_eof()
            result = codec.decode(UploadResult, json.loads(await stream.reader.readline()))
        finally:
            await stream.close()
        if result.code:
            raise AgentError(result.code, result.message, retryable=result.code != "upload.digest_mismatch")

    async def _ticketed(self, request: StreamRequest) -> tuple[StreamTicket, Bytes]:
        ticket: StreamTicket = await self.call("stream.open", request)
        stream = Bytes(*await asyncio.open_unix_connection(self.socket))
        await stream.write(json.dumps({"face": "stream", "ticket": ticket.ticket}).encode() + b"\n")
        return ticket, stream

    def leftovers(self) -> dict[str, list[str]]:
        """What a purge must leave nothing of: processes, links, routes, mounts, cgroups, files (`by what`)."""
        processes = self.host.exec(["ps", "-eo", "args"]).stdout.decode().splitlines()
        programs = ("qemu-", "runc", "/sleep")
        links = json.loads(self.host.exec(["ip", "-json", "link"]).stdout)
        mounts = self.host.exec(["cat", "/proc/mounts"]).stdout.decode().splitlines()
        routes = [
            line
            for what in (["route", "show", "table", "all"], ["-6", "route", "show", "table", "all"], ["rule"])
            for line in self.host.exec(["ip", *what]).stdout.decode().splitlines()
        ]
        cgroups = self.host.exec(["find", "/sys/fs/cgroup", "-type", "d"]).stdout.decode().splitlines()
        kept = ("lib/bedplate/vm", "lib/bedplate/volume", "log/bedplate/vm")
        files = [str(path) for name in kept for path in (self.host.disk / "var" / name).rglob("*")]
        files += [
            str(path) for name in ("vm", "volume", "runc") for path in (self.host.root / "run/bedplate" / name).rglob("*")
        ]
        return {
            "processes": sorted(line for line in processes if any(program in line for program in programs)),
            "links": sorted(link["ifname"] for link in links),
            "routes": sorted(line.strip() for line in routes if "proto kernel" not in line),
            "cgroups": sorted(path for path in cgroups if not path.endswith("/bedplate")),  # the parent of all is the agent's
            "mounts": sorted(" ".join(line.split(" ")[1:3]) for line in mounts),
            "files": sorted(files),
        }


class Bytes:
    """Raw bytes both ways on one connection, as the control plane's streams are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def read(self, limit: int = 65_536) -> bytes:
        return await self.reader.read(limit)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def write_eof(self) -> None:
        self._writer.write_eof()

    async def close(self) -> None:
        self._writer.close()


def can_connect(host: LabHost, argv: list[str], *, seconds: float) -> subprocess.CompletedProcess[bytes]:
    """Runs `argv` inside the host again and again until it succeeds. Every try has a deadline of its own."""
    end = time.monotonic() + seconds
    while True:
        try:
            done = host.exec(argv, timeout=15, check=False)
        except subprocess.TimeoutExpired:
            done = subprocess.CompletedProcess(argv, 124, b"", b"timed out")
        if done.returncode == 0:
            return done
        if time.monotonic() > end:
            raise AssertionError(f"{argv} does not succeed in {seconds} s: {done.stderr.decode(errors='replace')}")
        time.sleep(LOOK_SECONDS)
