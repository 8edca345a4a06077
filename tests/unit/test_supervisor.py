"""The supervisor with small shell children: order, restarts, orderly ends, and nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from controlplane.embedded import log as log_module
from controlplane.embedded.log import Log
from controlplane.embedded.supervisor import Service, ServiceFailed, Supervisor

ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def shell(name: str, script: str, **options: object) -> Service:
    return Service(name=name, argv=("sh", "-c", script), environment=ENVIRONMENT, **options)  # type: ignore[arg-type]


def exists(path: Path) -> Callable[[], object]:
    async def check() -> bool:
        return path.exists()

    return check


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.02)


class Told(list[tuple[str, str]]):
    def __call__(self, name: str, words: str) -> None:
        self.append((name, words))


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    told = Told()
    supervisor = Supervisor([shell("one", "exec sleep 60")], log_directory=tmp_path, report=told, echo=False)
    await supervisor.start()
    first = supervisor.pid("one")
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: supervisor.pid("one") not in {None, first})
    await supervisor.stop()
    assert any("was ended by SIGKILL" in words for _, words in told)
    assert supervisor.pid("one") is None


async def test_what_never_becomes_ready_fails_the_start_with_its_last_words(tmp_path: Path) -> None:
    service = shell("bad", "echo the port is taken; exit 3", is_ready=exists(tmp_path / "never"))
    supervisor = Supervisor([service], log_directory=tmp_path / "logs", report=Told(), echo=False)
    with pytest.raises(ServiceFailed, match=r"(?s)bad ended with exit code 3.*the port is taken"):
        await supervisor.start()
    await supervisor.stop()


async def test_grandchildren_do_not_outlive_their_parent(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    service = shell("parent", f"sleep 60 & echo $! >{pids}; wait", is_ready=exists(pids))
    supervisor = Supervisor([service], log_directory=tmp_path / "logs", report=Told(), echo=False)
    await supervisor.start()
    await until(lambda: pids.read_text().strip() != "")
    grandchild = int(pids.read_text())
    assert is_alive(grandchild)
    await supervisor.stop()
    await until(lambda: not is_alive(grandchild))


async def test_a_child_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    service = shell("deaf", f"trap '' TERM; touch {ready}; while :; do sleep 1; done", is_ready=exists(ready), stop_seconds=0.2)
    told = Told()
    supervisor = Supervisor([service], log_directory=tmp_path / "logs", report=told, echo=False)
    await supervisor.start()
    await supervisor.stop()
    assert ("deaf", "stopped") in told
    assert any("did not stop" in words for _, words in told)


async def test_they_start_after_what_they_need_and_stop_in_reverse(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    services = [
        shell("first", f"sleep 0.2; touch {ready}; exec sleep 60", is_ready=exists(ready)),
        shell("second", f"test -e {ready} && exec sleep 60", after=("first",)),
    ]
    told = Told()
    supervisor = Supervisor(services, log_directory=tmp_path / "logs", report=told, echo=False)
    await supervisor.start()
    await supervisor.stop()
    assert [name for name, words in told if words == "stopped"] == ["second", "first"]
    assert not any("ended" in words for _, words in told)


def test_a_log_is_turned_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LARGEST_BYTES", 1000)
    log = Log(tmp_path / "x.log", "x", echo=False)
    for number in range(100):
        log.write(f"{number:03} {'.' * 40}\n".encode())
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.log", "x.log.1"]
    assert all(path.stat().st_size < 1100 for path in tmp_path.iterdir())
    assert (tmp_path / "x.log").stat().st_mode & 0o777 == 0o600
