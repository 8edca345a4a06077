"""A real `serve` process, rooted in a directory with a short name, and a client that goes through `dispatch`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hostagent.lib.paths import Paths
from hostagent.protocol import codec, frames
from hostagent.protocol.frames import Answer, Event, Request
from hostagent.protocol.verbs import ANSWER
from tests.agent.balancing import Edge, Stage

if TYPE_CHECKING:
    from tests.agent.sshd import Sshd

DEADLINE_SECONDS = 30.0


class Client:
    """One rpc channel through a real `dispatch` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.stray: list[Answer] = []
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ids = 0
        self._reading = asyncio.create_task(self._read())

    async def send(self, verb: str, body: object, *, deadline_ms: int = 20_000) -> asyncio.Future[Answer]:
        self._ids += 1
        waiter = self._waiting[self._ids] = asyncio.get_running_loop().create_future()
        request = Request(id=self._ids, verb=verb, deadline_ms=deadline_ms, body=codec.encode(body))
        await self.write(frames.encode(request))
        return waiter

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def call(self, verb: str, body: object, *, deadline_ms: int = 20_000) -> Any:
        async with asyncio.timeout(DEADLINE_SECONDS):
            answer = await (await self.send(verb, body, deadline_ms=deadline_ms))
        if answer.error is not None:
            raise answer.error
        return codec.decode(ANSWER[verb], answer.body)

    async def close(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._reading
            return await self.process.wait()

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            frame = frames.decode(line)
            if isinstance(frame, Event):
                self.events.put_nowait(frame)
            elif isinstance(frame, Answer):
                waiter = self._waiting.pop(frame.id, None)
                if waiter is None or waiter.done():
                    self.stray.append(frame)
                else:
                    waiter.set_result(frame)
        assert self.process.stderr is not None
        words = f"the agent closed the channel: {await self.process.wait()} {(await self.process.stderr.read())!r}"
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(ConnectionResetError(words))
                waiter.exception()


class Served:
    """A host directory with `serve` running on it (and whatever survives `serve`)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = Paths.under(root)
        self.process: asyncio.subprocess.Process | None = None
        self.supervisor: asyncio.subprocess.Process | None = None
        self.clients: list[Client] = []

    async def start(self) -> None:
        self.process = await _python("-m", "hostagent", "serve", "--root", str(self.root), "--interval", "0.5")
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not await self.is_answering():
                assert self.process.returncode is None, "serve ended"
                await asyncio.sleep(0.02)

    async def is_answering(self) -> bool:
        """Connecting proves nothing: a program that a killed `serve` was just starting holds its socket for a moment."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.paths.socket)
            writer.write(b'{"face":"rpc"}\nhello\n')
            answer = await reader.readline()
        except OSError:
            return False
        writer.close()
        return bool(answer)

    async def start_supervisor(self) -> None:
        arguments = ("--run", str(self.paths.run), "--units", str(self.paths.config / "units.d"))
        self.supervisor = await _python("-m", "hostagent.drivers.supervisor.init", *arguments)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not (self.paths.run / "supervisor.sock").exists():
                assert self.supervisor.returncode is None, "the supervisor ended"
                await asyncio.sleep(0.02)

    async def dispatch(self, command: bytes, **pipes: Any) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        environment = {**os.environb, b"SSH_ORIGINAL_COMMAND": command}
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "hostagent", "dispatch", "--root", str(self.root),
            env=environment, limit=2 * frames.MAX_LINE_BYTES, **({"stdin": pipe, "stdout": pipe, "stderr": pipe} | pipes),
        )  # fmt: skip

    async def client(self) -> Client:
        client = Client(await self.dispatch(b"rpc"))
        self.clients.append(client)
        return client

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        for process in (self.process, self.supervisor):
            if process is not None and process.returncode is None:
                process.terminate()
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await process.wait()


async def _python(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *arguments)


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """`serve` with fake drivers; parametrise indirectly with "plain" for processes under the plain supervisor, or with
    "small" for a state directory of 4 MiB.
    """
    variant = getattr(request, "param", "fake")
    kind = "plain" if variant == "plain" else "fake"
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    served = Served(root)
    served.paths.config.mkdir(parents=True)
    served.paths.host_config.write_text(f'drivers = "fake"\nsupervisor = "{kind}"\ncpus = 1\nmemory_bytes = 1073741824\n')
    served.paths.state.mkdir(parents=True)
    if variant == "small":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(served.paths.state)], check=True)
    (served.paths.state / "kvm.json").write_text(
        json.dumps(
            {
                "boot_id": served.paths.boot_id(),
                "fact": {"device_present": False, "usable": False, "reason": "not probed in this test"},
            }
        )
    )
    try:
        if kind == "plain":
            await served.start_supervisor()
        await served.start()
        yield served
    finally:
        with contextlib.suppress(ConnectionError):
            await served.stop()
        if variant == "small":
            subprocess.run(["umount", str(served.paths.state)], check=True)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
async def sshd(served: Served, tmp_path: Path) -> AsyncIterator[Sshd]:
    from tests.agent.sshd import Sshd  # an SSH library: not on every machine where this directory's suites run

    daemon = Sshd(tmp_path, served.root)
    await daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture
async def edge(own_network: None, tmp_path: Path) -> AsyncIterator[Edge]:
    """A balancer without any service, with a client and four backends around it."""
    del own_network
    stage = Stage()
    made = Edge(stage, tmp_path)
    try:
        stage.build()
        for backend in stage.backends:
            backend.listen()
        await made.start()
        yield made
    finally:
        await made.close()
        await stage.close()
