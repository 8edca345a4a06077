"""Every supervisor: named processes that are found again, left alone while they run, and remembered when they end."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.drivers.supervisor.fake import FakeSupervisor
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitWanted
from hostagent.drivers.supervisor.systemd import SystemdSupervisor
from hostagent.install.commands import CommandFailed, command
from hostagent.install.unit import restart
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from tests.conformance.conftest import Daemon

SLEEP = UnitWanted(name="vm-vm_1", argv=("/bin/sleep", "600"))


@pytest.fixture(params=["fake", "plain", pytest.param("systemd", marks=pytest.mark.caps("systemd"))])
async def supervisor(request: pytest.FixtureRequest, daemon: Daemon) -> AsyncIterator[SupervisorDriver]:
    if request.param == "fake":
        yield FakeSupervisor()
        return
    driver = SystemdSupervisor() if request.param == "systemd" else daemon.driver
    yield driver
    for name in await driver.names():
        await driver.remove(name)


async def kill(supervisor: SupervisorDriver, name: str) -> None:
    if isinstance(supervisor, FakeSupervisor):
        supervisor.die(name)
        return
    observed = await supervisor.observe(name)
    assert observed is not None
    assert observed.incarnation is not None
    os.kill(observed.incarnation.pid, signal.SIGKILL)

    async def has_ended() -> bool:
        observed = await supervisor.observe(name)
        return observed is not None and observed.state == "exited"

    assert await until(has_ended, seconds=10)


async def test_a_unit_nobody_asked_for_is_absent(supervisor):
    assert await supervisor.observe("vm-vm_1") is None
    await supervisor.remove("vm-vm_1")


async def test_a_running_unit_is_left_alone(supervisor):
    first = await supervisor.apply(SLEEP)
    again = await supervisor.apply(UnitWanted(name=SLEEP.name, argv=("/bin/sleep", "601")))

    assert first.state == "running"
    assert again == first == await supervisor.observe(SLEEP.name)
    assert await supervisor.names() == (SLEEP.name,)


async def test_how_a_unit_ended_is_remembered_and_it_starts_anew(supervisor):
    first = await supervisor.apply(SLEEP)
    await kill(supervisor, SLEEP.name)

    ended = await supervisor.observe(SLEEP.name)
    assert ended is not None
    assert (ended.state, ended.exit_code, ended.exit_signal) == ("exited", None, 9)
    second = await supervisor.apply(SLEEP)
    assert second.state == "running"
    assert second.incarnation != first.incarnation


async def test_a_removed_unit_is_forgotten(supervisor):
    await supervisor.apply(SLEEP)
    await supervisor.remove(SLEEP.name)

    assert await supervisor.observe(SLEEP.name) is None
    assert await supervisor.names() == ()
    await supervisor.remove(SLEEP.name)


async def test_what_a_unit_says_is_appended_to_its_log(supervisor: SupervisorDriver, paths: Paths) -> None:
    if isinstance(supervisor, FakeSupervisor):
        pytest.skip("its processes say nothing")
    log = paths.log / "volume" / "one.log"
    said = UnitWanted(name="vm-vm_2", argv=("/bin/sh", "-c", "echo $0; exec sleep 600", "a word"), log_path=log)
    await supervisor.apply(said)

    async def is_there() -> bool:
        return log.exists() and log.read_text() == "a word\n"

    assert await until(is_there, seconds=20), "also where the directory was not there"


SERVICE = """\
[Service]
Type=notify
ExecStart=/bin/sh -c 'echo "cannot reach {reason}" >&2; {then}'
Restart=always
RestartSec=1
"""


@pytest.mark.caps("systemd")
@pytest.mark.parametrize(
    ("then", "known"), [("exec sleep 600", "activating"), ("exit 3", "ExecMainStatus=3")], ids=["never says it", "ends"]
)
def test_a_systemd_service_that_does_not_come_up_is_given_up_in_time_and_says_why(then: str, known: str) -> None:
    name = f"bedplate-trial{os.getpid()}.service"
    file = Path("/run/systemd/system") / name
    reason = f"the moon {uuid.uuid4().hex[:8]}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SERVICE.format(reason=reason, then=then))
    try:
        command("systemctl", "daemon-reload")
        began = time.monotonic()
        with pytest.raises(CommandFailed, match=rf"(?s)systemctl restart.*{known}.*cannot reach {reason}"):
            restart(name, seconds=5)
        assert time.monotonic() - began < 60
    finally:
        command("systemctl", "kill", "--signal=KILL", name, check=False)
        command("systemctl", "stop", name, check=False)
        file.unlink()
        command("systemctl", "daemon-reload")
        command("systemctl", "reset-failed", name, check=False)
