"""Starts processes in order, starts again what dies, stops all in reverse order.

The one rule: no process outlives the supervisor. Each child leads a process group of its own, and the kernel sends it
`death_signal` when the supervisor is gone (prctl(2), PR_SET_PDEATHSIG, set by setpriv(1)).
"""

from __future__ import annotations

import asyncio
import pwd
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.embedded.log import Log
from controlplane.embedded.process import Process

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 15.0
_STEADY_SECONDS = 30.0  # a child that ran so long starts again without a pause
_FIRST_START_TRIES = 3


class ServiceFailed(RuntimeError):
    """A process did not come up; the message carries the end of its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process of the table. Without `is_ready` it counts as ready once it runs."""

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    is_ready: Callable[[], Awaitable[bool]] | None = None
    prepare: Callable[[], None] | None = None  # before every start
    ready_seconds: float = 60
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 15
    death_signal: signal.Signals = signal.SIGKILL
    account: pwd.struct_passwd | None = None
    after: tuple[str, ...] = ()


@dataclass(slots=True)
class Child:
    """A service and the process that is it at the moment."""

    service: Service
    log: Log
    process: Process | None = None
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    starts: int = 0
    failure: str = ""
    watcher: asyncio.Task[None] | None = None


class Supervisor:
    """Runs a table of services. `report(name, words)` gets one line for each change."""

    def __init__(self, services: list[Service], *, log_directory: Path, report: Callable[[str, str], None], echo: bool) -> None:
        self._report = report
        self._children = {
            service.name: Child(service, Log(log_directory / f"{service.name}.log", service.name, echo=echo))
            for service in services
        }
        self._is_stopping = False

    def pid(self, name: str) -> int | None:
        process = self._children[name].process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start all, each after what it needs; return when all are ready. Raises ServiceFailed."""
        for child in self._children.values():
            for needed in child.service.after:
                await self._wait_up(self._children[needed])
            child.watcher = asyncio.create_task(self._keep_running(child), name=f"keep {child.service.name}")
        for child in self._children.values():
            await self._wait_up(child)

    async def _wait_up(self, child: Child) -> None:
        if child.watcher is None:
            raise ServiceFailed(f"{child.service.name} stands before what it needs in the table")
        up = asyncio.create_task(child.is_up.wait())
        await asyncio.wait({up, child.watcher}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if child.is_up.is_set():
            return
        await child.watcher
        raise ServiceFailed(child.failure)

    async def stop(self) -> None:
        """Stop all in reverse order. Idempotent."""
        self._is_stopping = True
        for child in reversed(self._children.values()):
            if child.watcher is not None:
                child.watcher.cancel()
                await asyncio.gather(child.watcher, return_exceptions=True)
            if child.process is not None:
                await self._stop_process(child, child.process)
            child.log.close()

    async def _stop_process(self, child: Child, process: Process) -> None:
        if process.returncode is None:
            process.send_signal(child.service.stop_signal)
            try:
                async with asyncio.timeout(child.service.stop_seconds):
                    await process.wait()
            except TimeoutError:
                self._report(child.service.name, f"did not stop within {child.service.stop_seconds:.0f} s; killing it")
        await _reap(process)
        self._report(child.service.name, "stopped")

    async def _keep_running(self, child: Child) -> None:
        pause = _FIRST_PAUSE_SECONDS
        while not self._is_stopping:
            began = time.monotonic()
            reason = await self._run_once(child)
            if not child.is_up.is_set() and child.starts >= _FIRST_START_TRIES:
                child.failure = f"{child.service.name} {reason}; the end of its log:\n{child.log.tail()}"
                return
            if time.monotonic() - began > _STEADY_SECONDS:
                pause = _FIRST_PAUSE_SECONDS
            self._report(child.service.name, f"{reason}; starting it again in {pause:.1f} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _run_once(self, child: Child) -> str:
        """One life of the process; returns how it ended, in words."""
        began = time.monotonic()
        try:
            process = await self._spawn(child)
        except (OSError, RuntimeError) as error:
            child.starts += 1
            return f"could not be started: {error}"
        if not await self._becomes_ready(child, process):
            await _reap(process)
            return f"was not ready within {child.service.ready_seconds:.0f} s"
        if process.returncode is None:
            words = f"ready in {time.monotonic() - began:.1f} s" if child.service.is_ready else "started"
            self._report(child.service.name, f"{words} (pid {process.pid})")
            child.is_up.set()
        code = await process.wait()
        await _reap(process)
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    async def _spawn(self, child: Child) -> Process:
        service = child.service
        if service.prepare is not None:
            await asyncio.to_thread(service.prepare)
        child.starts += 1
        child.process = Process(
            service.argv,
            environment=service.environment,
            write=child.log.write,
            death_signal=service.death_signal,
            account=service.account,
        )
        return child.process

    async def _becomes_ready(self, child: Child, process: Process) -> bool:
        """True when it answers or has ended; False when the time is over."""
        is_ready = child.service.is_ready
        if is_ready is None:
            return True
        deadline = time.monotonic() + child.service.ready_seconds
        while process.returncode is None:
            if await is_ready():
                return True
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True


async def _reap(process: Process) -> None:
    """Make sure that nothing of the process is left, and that its last words are in the log."""
    process.kill()
    await process.wait()
    process.drain()
