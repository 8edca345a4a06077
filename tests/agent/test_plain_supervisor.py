"""The plain supervisor's daemon by itself: rights, logs, deaths of units and of the daemon, pid 1."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostagent.drivers.supervisor.init import Init
from hostagent.drivers.supervisor.protocol import UnitLimits, UnitWanted
from hostagent.drivers.supervisor.unit import Unit
from hostagent.drivers.supervisor.wire import unit_to_json
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from tests.conformance.conftest import Daemon, daemon, paths

__all__ = ["daemon", "paths"]
DEADLINE_SECONDS = 20.0


def unit(*argv: str, **more: object) -> UnitWanted:
    return UnitWanted(name="unit-1", argv=argv, **more)  # type: ignore[arg-type]


async def ended(daemon: Daemon, name: str = "unit-1"):
    async def has_ended() -> bool:
        observed = await daemon.driver.observe(name)
        return observed is not None and observed.state == "exited"

    assert await until(has_ended, seconds=DEADLINE_SECONDS)
    return await daemon.driver.observe(name)


async def test_exit_codes_and_signals_are_told_apart(daemon):
    for argv, expected in (
        (("/bin/sh", "-c", "exit 3"), (3, None)),
        (("/bin/true",), (0, None)),
        (("/bin/sh", "-c", "kill -SEGV $$"), (None, int(signal.SIGSEGV))),
    ):
        await daemon.driver.apply(unit(*argv))
        observed = await ended(daemon)
        assert (observed.exit_code, observed.exit_signal) == expected


async def test_output_goes_to_the_log_and_the_environment_is_small(daemon, paths, monkeypatch):
    monkeypatch.setenv("PLANTED", "secret")
    log = paths.log / "unit.log"
    for text in ("one", "two"):
        await daemon.driver.apply(unit("/bin/sh", "-c", f"echo {text}; env >&2", env={"MORE": "1"}, log_path=log))
        await ended(daemon)

    lines = log.read_text().splitlines()
    assert [line for line in lines if "=" not in line] == ["one", "two"]
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert names == {"PATH", "LANG", "MORE", "PWD"}


async def test_a_missing_program_is_an_error_for_good(daemon):
    with pytest.raises(AgentError) as failed:
        await daemon.driver.apply(unit("/no/such/program"))
    assert (failed.value.code, failed.value.retryable) == ("supervisor.start_failed", False)
    assert await daemon.driver.names() == ()


@pytest.mark.caps("root")
async def test_a_unit_runs_with_its_own_rights_and_limits(daemon):
    wanted = unit(
        "/bin/sleep", "60", uid=1234, gid=1235, groups=(1236,), limits=UnitLimits(cpus=(0,), open_files=100)
    )  # fmt: skip
    observed = await daemon.driver.apply(wanted)

    status = Path(f"/proc/{observed.incarnation.pid}/status").read_text()
    assert "Uid:\t1234\t1234\t1234\t1234" in status
    assert "Gid:\t1235\t1235\t1235\t1235" in status
    assert "Groups:\t1236" in status
    assert "CapEff:\t0000000000000000" in status
    assert "Cpus_allowed_list:\t0\n" in status
    limits = Path(f"/proc/{observed.incarnation.pid}/limits").read_text()
    assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["100"]


async def test_a_unit_that_does_not_listen_is_killed_with_its_children(daemon):
    script = "trap '' TERM; sleep 600 & echo ready; wait; wait"
    log = daemon.paths.log / "unit.log"
    observed = await daemon.driver.apply(unit("/bin/sh", "-c", script, log_path=log, stop_grace_seconds=0.3))

    async def is_ready() -> bool:
        return "ready" in log.read_text()

    assert await until(is_ready, seconds=DEADLINE_SECONDS)
    await daemon.driver.remove("unit-1")
    assert await daemon.driver.observe("unit-1") is None

    async def is_session_gone() -> bool:
        return subprocess.run(["pgrep", "-s", str(observed.incarnation.pid)], check=False, capture_output=True).returncode == 1

    assert await until(is_session_gone, seconds=DEADLINE_SECONDS)


async def test_units_outlive_the_daemon_and_are_watched_again(daemon):
    first = await daemon.driver.apply(unit("/bin/sleep", "600"))
    await daemon.kill()
    assert Path(f"/proc/{first.incarnation.pid}").exists()

    await daemon.start()
    assert await daemon.driver.observe("unit-1") == first
    assert await daemon.driver.apply(unit("/bin/sleep", "601")) == first
    os.kill(first.incarnation.pid, signal.SIGKILL)
    observed = await ended(daemon)
    assert (observed.exit_code, observed.exit_signal) == (None, None)
    await daemon.driver.remove("unit-1")


async def test_a_unit_that_died_while_the_daemon_was_away_is_not_mistaken_for_another_process(daemon):
    first = await daemon.driver.apply(unit("/bin/sleep", "600"))
    await daemon.kill()
    os.kill(first.incarnation.pid, signal.SIGKILL)
    memory = daemon.paths.run / "supervisor/unit-1.json"
    plain = json.loads(memory.read_text())
    plain["observed"]["incarnation"]["pid"] = os.getpid()  # reused by somebody else
    memory.write_text(json.dumps(plain))

    await daemon.start()
    assert (await daemon.driver.observe("unit-1")).state == "exited"
    await daemon.driver.remove("unit-1")


async def test_nonsense_is_answered_and_harms_nobody(daemon):
    await daemon.driver.apply(unit("/bin/sleep", "600"))
    requests = (
        b"nonsense\n",
        b"[]\n",
        b'{"op":"fly"}\n',
        b'{"op":"apply","unit":{"name":"x","argv":["relative"]}}\n',
        b"\xff\n",
    )
    for request in requests:
        reader, writer = await asyncio.open_unix_connection(daemon.driver.socket_path)
        writer.write(request)
        async with asyncio.timeout(DEADLINE_SECONDS):
            assert json.loads(await reader.readline())["ok"] is False
        writer.close()
        await writer.wait_closed()
    assert (await daemon.driver.observe("unit-1")).state == "running"


@pytest.mark.caps("root")
async def test_only_root_may_speak_to_it(daemon):
    daemon.driver.socket_path.chmod(0o777)  # even then
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1]);"
        's.sendall(b\'{"op":"names"}\\n\'); print(s.recv(100))'
    )
    argv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", script]
    done = subprocess.run([*argv, str(daemon.driver.socket_path)], check=False, capture_output=True, text=True, timeout=20)

    assert "b''" in done.stdout or "ConnectionResetError" in done.stderr or "BrokenPipe" in done.stderr


@pytest.mark.caps("root", "netns")
def test_as_pid_1_it_reaps_orphans_and_starts_what_it_finds(paths, tmp_path):
    units = paths.config / "units.d"
    units.mkdir(parents=True)
    orphans = "for i in 1 2 3; do (sleep 0.1 &) ; done; exec sleep 600"
    (units / "a.json").write_text(json.dumps({"name": "a", "argv": ["/bin/sh", "-c", orphans]}))
    (units / "b.json").write_text(json.dumps({"name": "b", "argv": ["/bin/sh", "-c", "echo x >> " + str(tmp_path / "starts")]}))
    (units / "broken.json").write_text("{")
    argv = [
        "unshare",
        "--fork",
        "--pid",
        "--mount-proc",
        "--kill-child",
        sys.executable,
        "-m",
        "hostagent.drivers.supervisor.init",
    ]
    with subprocess.Popen([*argv, "--run", str(paths.run), "--units", str(units)], stderr=subprocess.DEVNULL) as process:
        try:
            boot_id = _wait((paths.run / "boot_id").read_text)
            assert boot_id.strip() != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            _wait(lambda: (tmp_path / "starts").read_text().count("x") >= 2)  # it ended, and was started again
            _wait(lambda: _ask(paths.run, {"op": "observe", "name": "a"})["unit"]["state"] == "running")
            init = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()[0]

            def zombies() -> str:
                done = subprocess.run(["ps", "--ppid", init, "-o", "stat="], check=False, capture_output=True, text=True)
                return "".join(line for line in done.stdout.splitlines() if line.startswith("Z"))

            _wait(lambda: not zombies())
        finally:
            process.kill()


def _ask(run: Path, request: dict[str, str]) -> dict:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(run / "supervisor.sock"))
        connection.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(connection.makefile().readline())


def _wait(condition):
    end = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            found = condition()
        except (OSError, KeyError, TypeError):
            found = None
        if found:
            return found
        assert time.monotonic() < end
        time.sleep(0.05)


async def test_a_process_that_does_not_end_is_not_forgotten_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    init = Init(tmp_path)
    (tmp_path / "supervisor").mkdir()
    wanted = unit_to_json(unit("/bin/sleep", "60", stop_grace_seconds=0.01))
    first = init._apply(wanted)
    process = first.pid
    assert process is not None
    with monkeypatch.context() as patch:
        patch.setattr(Unit, "_signal", lambda _unit, _number: True)  # as if it hung in the kernel
        patch.setattr("hostagent.drivers.supervisor.unit._kill_session", lambda _session: None)
        patch.setattr("hostagent.drivers.supervisor.unit.KILL_GRACE_SECONDS", 0.01)
        answer = await init._answer(b'{"op": "remove", "name": "unit-1"}')
        assert (answer["ok"], answer["code"]) == (False, "supervisor.stop_failed")
    assert init._apply(wanted).pid == process
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    first.ended(-9)
    assert await init._answer(b'{"op": "remove", "name": "unit-1"}') == {"ok": True}
