"""Pid 1 of a lab host: starts the units it finds, starts them again when they end, reaps orphans.

The one rule: standard library only and no import of ours, because it runs as a plain file on the host.

A unit is a JSON file in `/etc/lab/units.d` (the base system) or `/etc/bedplate/units.d` (the product):
`{"name": "agent", "argv": ["/absolute/program", …], "env": {…}}`. SIGHUP reads both directories again: new units start,
removed ones stop, changed ones restart. SIGTERM stops everything and ends the host. Output goes to `/var/log/units/NAME.log`.
A unit that ended starts again after 0.2 s, doubled up to 10 s while it keeps failing within 10 s.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIRECTORIES = (Path("/etc/lab/units.d"), Path("/etc/bedplate/units.d"))
LOGS = Path("/var/log/units")
FIRST_DELAY_SECONDS, LAST_DELAY_SECONDS, STABLE_SECONDS, GRACE_SECONDS = 0.2, 10.0, 10.0, 5.0
HANDLED = {signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD}


@dataclass(slots=True)
class Unit:
    """`pid` 0 = not running; `wanted` None = removed, waiting for its end."""

    name: str
    wanted: dict[str, Any] | None
    running: dict[str, Any] = field(default_factory=dict)
    pid: int = 0
    started_at: float = 0.0
    start_at: float = 0.0
    delay_seconds: float = FIRST_DELAY_SECONDS
    kill_at: float = 0.0


def read_units() -> dict[str, dict[str, Any]]:
    """Unreadable files are named on stderr and passed over: one bad unit must not stop the rest."""
    units: dict[str, dict[str, Any]] = {}
    for path in sorted(path for directory in DIRECTORIES for path in directory.glob("*.json")):
        try:
            unit = json.loads(path.read_text())
            units[str(unit["name"])] = {
                "argv": [str(word) for word in unit["argv"]],
                "env": {str(key): str(value) for key, value in unit.get("env", {}).items()},
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            os.write(2, f"init: {path}: {error}\n".encode())
    return units


def spawn(unit: Unit) -> None:
    assert unit.wanted is not None
    log = os.open(LOGS / f"{unit.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    unit.running, unit.started_at, unit.kill_at = unit.wanted, time.monotonic(), 0.0
    argv = unit.wanted["argv"]
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.execve(argv[0], argv, {**os.environ, **unit.wanted["env"]})  # noqa: S606 - constant argv from root's own files
        except OSError as error:
            os.write(2, f"init: {argv[0]}: {error}\n".encode())
        finally:
            os._exit(127)
    os.close(log)
    unit.pid = pid


class Init:
    """The units by name, and what is due next."""

    def __init__(self) -> None:
        self.units: dict[str, Unit] = {}
        self.is_stopping = False

    def reload(self) -> None:
        found = read_units()
        for name, wanted in found.items():
            unit = self.units.setdefault(name, Unit(name=name, wanted=wanted))
            unit.wanted, unit.delay_seconds = wanted, FIRST_DELAY_SECONDS
        for name, unit in self.units.items():
            if name not in found:
                unit.wanted = None
            if unit.pid and unit.running != unit.wanted:
                self._stop(unit)

    def _stop(self, unit: Unit) -> None:
        if unit.pid and not unit.kill_at:
            os.kill(unit.pid, signal.SIGTERM)
            unit.kill_at = time.monotonic() + GRACE_SECONDS

    def reap(self) -> None:
        while True:
            try:
                pid, _status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for unit in self.units.values():
                if unit.pid == pid:
                    self._ended(unit)

    def _ended(self, unit: Unit) -> None:
        now = time.monotonic()
        was_stopped = bool(unit.kill_at)
        unit.pid = 0
        if now - unit.started_at > STABLE_SECONDS or was_stopped:
            unit.delay_seconds = FIRST_DELAY_SECONDS
        unit.start_at = now if was_stopped else now + unit.delay_seconds
        unit.delay_seconds = min(unit.delay_seconds * 2, LAST_DELAY_SECONDS)

    def act(self) -> float:
        """Does what is due and returns the seconds until something is due again."""
        now, due = time.monotonic(), 3600.0
        for unit in list(self.units.values()):
            if unit.pid and unit.kill_at:
                if unit.kill_at <= now:
                    os.kill(unit.pid, signal.SIGKILL)
                due = min(due, max(unit.kill_at - now, 0.1))
            elif not unit.pid and unit.wanted is None:
                del self.units[unit.name]
            elif not unit.pid and not self.is_stopping:
                if unit.start_at <= now:
                    spawn(unit)
                else:
                    due = min(due, unit.start_at - now)
        return due

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        LOGS.mkdir(parents=True, exist_ok=True)
        self.reload()
        while not (self.is_stopping and not any(unit.pid for unit in self.units.values())):
            received = signal.sigtimedwait(HANDLED, self.act())
            if received is not None and received.si_signo == signal.SIGHUP:
                self.reload()
            if received is not None and received.si_signo == signal.SIGTERM:
                self.is_stopping = True
                for unit in self.units.values():
                    self._stop(unit)
            self.reap()


if __name__ == "__main__":
    Init().run()
