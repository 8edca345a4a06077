"""One unit of the plain supervisor: a process in a session of its own, watched to its end.

The one rule: a process is named by its incarnation (pid + start time + boot), never by its pid alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from hostagent.drivers.supervisor.protocol import UnitLimits, UnitObserved, UnitWanted
from hostagent.drivers.supervisor.wire import observed_from_json, observed_to_json, unit_from_json, unit_to_json
from hostagent.lib.process import Incarnation, incarnation_of, is_alive, open_pidfd

FIRST_RESTART_SECONDS = 0.2
LAST_RESTART_SECONDS = 10.0
SETTLED_SECONDS = 10.0
KILL_GRACE_SECONDS = 10.0
BASE_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class StartError(Exception):
    """The program could not be started; `code` is the agent's error code."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class StopError(Exception):
    """The process does not end, not even by SIGKILL: it hangs in the kernel."""

    code = "supervisor.stop_failed"


class Unit:
    """States: running, exited. `restart` is `never` or `always` (with a growing pause)."""

    def __init__(self, wanted: UnitWanted, memory: Path, boot_id: str, *, restart: str = "never") -> None:
        if restart not in ("never", "always"):
            raise ValueError(f"restart must be never or always, not {restart!r}")
        self.wanted = wanted
        self.memory = memory
        self.boot_id = boot_id
        self.restart = restart
        self.incarnation: Incarnation | None = None
        self.exit_code: int | None = None
        self.exit_signal: int | None = None
        self._gone = asyncio.Event()
        self._gone.set()
        self._pause_seconds = FIRST_RESTART_SECONDS
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopping = False

    @classmethod
    def remembered(cls, memory: Path, boot_id: str) -> Unit:
        """The unit that an earlier daemon wrote down, watched again if it still runs."""
        plain = json.loads(memory.read_bytes())
        unit = cls(unit_from_json(plain["wanted"]), memory, boot_id, restart=plain["restart"])
        observed = observed_from_json(plain["observed"])
        unit.exit_code, unit.exit_signal = observed.exit_code, observed.exit_signal
        if observed.incarnation is not None and is_alive(observed.incarnation, boot_id):
            unit.incarnation = observed.incarnation
            unit._gone.clear()
            unit._watch(observed.incarnation)
        return unit

    @property
    def is_running(self) -> bool:
        return self.incarnation is not None

    @property
    def pid(self) -> int | None:
        return self.incarnation.pid if self.incarnation else None

    def observed(self) -> UnitObserved:
        return UnitObserved(
            name=self.wanted.name,
            state="running" if self.incarnation else "exited",
            incarnation=self.incarnation,
            exit_code=self.exit_code,
            exit_signal=self.exit_signal,
        )

    def start(self) -> None:
        """Raises StartError."""
        process = _spawn(self.wanted)
        process.returncode = 0  # the daemon reaps every child itself; subprocess must not
        self.incarnation = incarnation_of(process.pid, self.boot_id)
        self.exit_code = self.exit_signal = None
        self._started_at = time.monotonic()
        self._gone.clear()
        if self.incarnation is None:  # a zombie already: SIGCHLD is on its way and needs a pid to match
            self.incarnation = Incarnation(pid=process.pid, start_ticks=0, boot_id=self.boot_id)
        self._remember()

    def ended(self, code: int | None) -> None:
        """What waitpid said: an exit code, a negative signal number, or None where it cannot be known."""
        self.incarnation = None
        self.exit_code = code if code is not None and code >= 0 else None
        self.exit_signal = -code if code is not None and code < 0 else None
        self._gone.set()
        self._remember()
        if self.restart == "always" and not self._is_stopping:
            if time.monotonic() - self._started_at > SETTLED_SECONDS:
                self._pause_seconds = FIRST_RESTART_SECONDS
            self._timer = asyncio.get_running_loop().call_later(self._pause_seconds, self._start_again)
            self._pause_seconds = min(self._pause_seconds * 2, LAST_RESTART_SECONDS)

    def _start_again(self) -> None:
        self._timer = None
        try:
            self.start()
        except StartError:
            self.ended(127)

    def cancel_restart(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def stop(self) -> None:
        """Stop signal, grace, SIGKILL; then whatever is left in the unit's session is killed too."""
        self._is_stopping = True
        self.cancel_restart()
        session = self.pid
        if self._signal(signal.Signals[self.wanted.stop_signal]) and not await self._is_gone_within(
            self.wanted.stop_grace_seconds
        ):
            self._signal(signal.SIGKILL)
            await self._is_gone_within(KILL_GRACE_SECONDS)
        if session is not None:
            _kill_session(session)

    def forget(self) -> None:
        self.memory.unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> bool:
        if self.incarnation is None:
            return False
        descriptor = open_pidfd(self.incarnation, self.boot_id)
        if descriptor is None:
            return True  # its end is being reported
        try:
            signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return True
        finally:
            os.close(descriptor)
        return True

    async def _is_gone_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._gone.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _watch(self, incarnation: Incarnation) -> None:
        """For a process that is not our child: its pidfd becomes readable when it ends."""
        descriptor = open_pidfd(incarnation, self.boot_id)
        loop = asyncio.get_running_loop()

        def gone() -> None:
            assert descriptor is not None
            loop.remove_reader(descriptor)
            os.close(descriptor)
            if self.incarnation == incarnation:
                self.ended(None)

        if descriptor is None:
            self.ended(None)
        else:
            loop.add_reader(descriptor, gone)

    def _remember(self) -> None:
        plain = {"wanted": unit_to_json(self.wanted), "restart": self.restart, "observed": observed_to_json(self.observed())}
        fresh = self.memory.with_suffix(".new")
        fresh.write_text(json.dumps(plain), encoding="utf-8")
        fresh.replace(self.memory)


def _spawn(wanted: UnitWanted) -> subprocess.Popen[bytes]:
    try:
        wanted.log_path.parent.mkdir(parents=True, exist_ok=True)
        with wanted.log_path.open("ab") as log, _limited(wanted.limits):
            return subprocess.Popen(
                wanted.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=wanted.directory,
                env=BASE_ENVIRONMENT | wanted.env,
                user=wanted.uid if wanted.uid != os.geteuid() else None,
                group=wanted.gid if wanted.gid != os.getegid() else None,
                extra_groups=wanted.groups if os.geteuid() == 0 else None,
                umask=0o022,
                start_new_session=True,
            )
    except FileNotFoundError as error:
        raise StartError("supervisor.program_missing", f"{wanted.name}: {error}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError("supervisor.start_failed", f"{wanted.name}: {error}") from error


@contextlib.contextmanager
def _limited(limits: UnitLimits) -> Iterator[None]:
    """The daemon takes the limits on for the moment of the fork: a child that has dropped its rights could not raise them."""
    wanted = {resource.RLIMIT_NOFILE: limits.open_files, resource.RLIMIT_CORE: 0}
    if limits.locked_memory_bytes is not None:
        wanted[resource.RLIMIT_MEMLOCK] = limits.locked_memory_bytes
    before = {kind: resource.getrlimit(kind) for kind in wanted}
    cpus = os.sched_getaffinity(0)
    try:
        for kind, value in wanted.items():
            _set_soft_limit(kind, value, before[kind][1])
        if limits.cpus:
            os.sched_setaffinity(0, limits.cpus)
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        for kind, pair in before.items():
            resource.setrlimit(kind, pair)


def _set_soft_limit(kind: int, value: int, hard: int) -> None:
    """As far as the daemon may: without CAP_SYS_RESOURCE (a container) no further than the hard limit."""
    if hard == resource.RLIM_INFINITY or value <= hard:
        resource.setrlimit(kind, (value, hard))
        return
    try:
        resource.setrlimit(kind, (value, value))
    except ValueError:
        resource.setrlimit(kind, (hard, hard))


def _kill_session(session: int) -> None:
    """SIGKILL to every process whose session leader was the unit's process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            if int(stat[stat.rindex(")") + 2 :].split()[3]) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
