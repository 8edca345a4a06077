"""The plain supervisor's daemon: pid 1 of a host without systemd (a lab host), or a service of such a host.

`python -m hostagent.drivers.supervisor.init --run /run/bedplate [--units DIRECTORY]…`

It starts named units, reaps everything, and answers one JSON line per JSON line on `<run>/supervisor.sock` (root only):
`{"op": "apply", "unit": {…}}`, `{"op": "observe" | "remove", "name": …}`, `{"op": "names"}`, `{"op": "reload"}`; the answer
is `{"ok": true, …}` or `{"ok": false, "code", "message"}`. Units found as JSON files in the units directories start with the
daemon and again when they end, unless they say `"restart": "never"`; `reload` (or SIGHUP) starts what is new, stops
what lost its file, restarts what has another one.

The one rule: a unit outlives this daemon where it can. What runs is written down in `<run>/supervisor/`, so a daemon that
was restarted watches its units again by pidfd (their exit codes are then unknown); as pid 1 its end is the host's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import uuid
from pathlib import Path
from typing import Any

from hostagent.drivers.supervisor.unit import StartError, StopError, Unit
from hostagent.drivers.supervisor.wire import observed_to_json, unit_from_json
from hostagent.lib.process import kernel_boot_id

MAX_LINE_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class Init:
    """All units of one host."""

    def __init__(self, run: Path, units: tuple[Path, ...] = ()) -> None:
        self.run = run
        self.units_directories = units
        self.from_files: set[str] = set()
        self.units: dict[str, Unit] = {}
        self.boot_id = ""
        self._ended = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._hang_ups: set[asyncio.Task[None]] = set()

    async def main(self) -> None:
        """Until SIGTERM or SIGINT; then every unit is stopped, newest first."""
        loop = asyncio.get_running_loop()
        self._begin_boot()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self._adopt()
        server = await asyncio.start_unix_server(self._serve, self._socket_path(), limit=MAX_LINE_BYTES)
        self._socket_path().chmod(0o600)
        self._autostart(self._unit_files())
        self._reap()
        await self._ended.wait()
        server.close()
        for unit in reversed(list(self.units.values())):
            await unit.stop()

    def _hang_up(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload())
        self._hang_ups.add(task)
        task.add_done_callback(self._hang_ups.discard)

    def _socket_path(self) -> Path:
        return self.run / "supervisor.sock"

    def _begin_boot(self) -> None:
        """Namespaces share the kernel's boot id, so pid 1 of a lab host makes one for its host."""
        memory = self.run / "supervisor"
        self.run.mkdir(parents=True, exist_ok=True, mode=0o755)
        self.run.chmod(0o755)  # whatever the umask: the agent's login user passes through
        memory.mkdir(exist_ok=True, mode=0o700)
        if os.getpid() == 1:
            written = self.run / "boot_id"  # whoever made the namespaces may have chosen one already
            self.boot_id = written.read_text(encoding="ascii").strip() if written.exists() else str(uuid.uuid4())
            written.write_text(f"{self.boot_id}\n", encoding="ascii")
        else:
            self.boot_id = kernel_boot_id()
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        with contextlib.suppress(FileNotFoundError):
            self._socket_path().unlink()

    def _adopt(self) -> None:
        for file in sorted((self.run / "supervisor").glob("*.json")):
            try:
                unit = Unit.remembered(file, self.boot_id)
            except (ValueError, TypeError, KeyError) as error:
                print(f"bedplate-init: {file} is not a unit: {error}", file=sys.stderr, flush=True)
                file.unlink()
                continue
            self.units[unit.wanted.name] = unit

    def _unit_files(self) -> dict[str, tuple[dict[str, Any], str]]:
        """Unit and restart policy by name; one bad file does not keep the others down."""
        found: dict[str, tuple[dict[str, Any], str]] = {}
        for file in sorted(file for directory in self.units_directories for file in directory.glob("*.json")):
            try:
                plain = json.loads(file.read_bytes())
                restart = plain.pop("restart", "always")
                found[unit_from_json(plain).name] = plain, restart
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                print(f"bedplate-init: {file}: {error}", file=sys.stderr, flush=True)
        return found

    def _autostart(self, files: dict[str, tuple[dict[str, Any], str]]) -> None:
        for name, (plain, restart) in files.items():
            try:
                self._apply(plain, restart=restart)
            except (ValueError, StartError) as error:
                print(f"bedplate-init: {name}: {error}", file=sys.stderr, flush=True)
        self.from_files = set(files)

    async def _reload(self) -> None:
        """Stop what lost its file or has another one now, start what is not running.

        One at a time, and from one reading: a file that goes while units stop is the next reload's work.
        """
        async with self._reloading:
            files = self._unit_files()
            for name in self.from_files:
                unit = self.units.get(name)
                if unit is not None and (name not in files or unit_from_json(files[name][0]) != unit.wanted):
                    try:
                        await self._remove(name)
                    except StopError as error:
                        print(f"bedplate-init: {error}", file=sys.stderr, flush=True)
            self._autostart(files)

    def _reap(self) -> None:
        """Collects every child, also those that orphaned processes left to us."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for unit in self.units.values():
                if unit.pid == pid:
                    unit.ended(os.waitstatus_to_exitcode(status))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not _is_allowed(writer.get_extra_info("socket")):
                return
            while line := await reader.readline():
                answer = await self._answer(line)
                writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
                await writer.drain()
        except (ConnectionError, ValueError):
            return
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": True, **await self._do(request)}
        except (StartError, StopError) as error:
            return {"ok": False, "code": error.code, "message": str(error)}
        except (ValueError, TypeError, KeyError) as error:
            return {"ok": False, "code": "supervisor.bad_request", "message": f"{type(error).__name__}: {error}"}

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["op"]:
            case "apply":
                return {"unit": observed_to_json(self._apply(request["unit"]).observed())}
            case "observe":
                unit = self.units.get(request["name"])
                return {"unit": observed_to_json(unit.observed()) if unit else None}
            case "remove":
                await self._remove(request["name"])
                return {}
            case "reload":
                await self._reload()
                return {}
            case "names":
                return {"names": list(self.units), "boot_id": self.boot_id}
            case other:
                raise ValueError(f"unknown op {other!r}")

    def _apply(self, plain: dict[str, Any], *, restart: str = "never") -> Unit:
        wanted = unit_from_json(plain)
        unit = self.units.get(wanted.name)
        if unit is not None and unit.is_running:
            return unit
        if unit is not None:
            unit.cancel_restart()
        memory = self.run / "supervisor" / f"{wanted.name}.json"
        unit = Unit(wanted, memory, self.boot_id, restart=restart)
        unit.start()
        self.units[wanted.name] = unit
        return unit

    async def _remove(self, name: str) -> None:
        unit = self.units.get(name)
        if unit is None:
            return
        await unit.stop()
        if unit.is_running:  # forgotten, it would be started a second time beside itself
            raise StopError(f"{name}: process {unit.pid} is still there after SIGKILL")
        if self.units.get(name) is unit:
            del self.units[name]
            unit.forget()


def _is_allowed(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", credentials)[1]
    return uid in (0, os.geteuid())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bedplate-init", description="The plain supervisor.")
    parser.add_argument("--run", type=Path, default=Path("/run/bedplate"))
    parser.add_argument("--units", type=Path, action="append", default=[])
    options = parser.parse_args(arguments)
    asyncio.run(Init(options.run, tuple(options.units)).main())
    return 0


if __name__ == "__main__":
    sys.exit(main())
