"""What is Cloud Hypervisor's own: versions told apart, disks asked first, its console, its end. With the server that checks
each call, and with the real program where `BEDPLATE_CLOUD_HYPERVISOR` names it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest

from hostagent.drivers.machine.cloud_hypervisor import _ended
from hostagent.drivers.machine.cloud_hypervisor_config import RunFiles, vm_config
from hostagent.drivers.machine.protocol import DiskAttachment, NicAttachment
from hostagent.drivers.network.tap import make_tap
from hostagent.drivers.supervisor.protocol import UnitObserved
from hostagent.lib.unixhttp import UnixHttp, UnixHttpError
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation, NicWanted
from tests.conformance.test_machines import UID, VM, WANTED, cloud_hypervisor, install

NIC = NicWanted(id="nic_1", generation=Generation(epoch=1, number=1), mac="06:00:00:00:00:01", ipv4="10.1.2.3", ipv6="fd00::3")

pytestmark = pytest.mark.caps("root")


@pytest.fixture(params=["checking", pytest.param("real", marks=pytest.mark.caps("cloud_hypervisor"))])
async def microvm(request, paths, daemon):
    made = cloud_hypervisor(paths, daemon, is_real=request.param == "real")
    yield made
    await made.driver.remove(VM)


async def test_its_console_is_logged_and_can_be_looked_at(microvm, paths):
    observed = await microvm.driver.apply(microvm.stays)

    async def is_logged() -> bool:
        return b"hi\n" in paths.vm_log(VM).read_bytes()

    assert await until(is_logged, seconds=20)
    reader, writer = await asyncio.open_unix_connection(observed.console_socket)
    writer.write(b"x")
    await writer.drain()
    writer.close()
    assert not reader.at_eof()


async def test_a_killed_relay_of_the_console_comes_back(microvm, paths):
    await microvm.driver.apply(microvm.stays)
    unit = await microvm.driver.supervisor.observe("console-" + VM)
    os.kill(unit.incarnation.pid, signal.SIGKILL)

    async def is_gone() -> bool:
        return (await microvm.driver.supervisor.observe("console-" + VM)).state == "exited"

    assert await until(is_gone, seconds=10)
    await microvm.driver.apply(microvm.stays)
    assert (await microvm.driver.supervisor.observe("console-" + VM)).state == "running"


async def test_sigterm_from_outside_is_no_power_off_of_the_guest(microvm):
    observed = await microvm.driver.apply(microvm.stays)
    os.kill(observed.incarnation.pid, signal.SIGTERM)
    ended = await microvm.until_stopped()
    assert (ended.exit_reason, ended.exit_detail) == ("killed", "ended from outside")


async def test_a_vmm_whose_vm_never_booted_is_started_anew(microvm):
    """As an agent leaves it that died between `vm.create` and `vm.boot`."""
    first = await microvm.driver.apply(microvm.stays)
    api = UnixHttp(socket_path=RunFiles(directory=microvm.stays.run_directory).api)
    os.kill(first.incarnation.pid, signal.SIGKILL)
    await microvm.until_stopped()
    unit = microvm.driver.render(microvm.stays).units[-1]
    for stale in (api.socket_path, RunFiles(directory=microvm.stays.run_directory).serial):
        stale.unlink(missing_ok=True)
    await microvm.driver.supervisor.apply(unit)

    async def answers() -> bool:
        try:
            await api.call("PUT", "vm.create", vm_config(microvm.stays, has_landlock=False))
        except UnixHttpError:
            return False
        return True

    assert await until(answers, seconds=20)
    assert (await microvm.driver.apply(microvm.stays)).state == "running"
    assert (await api.call("GET", "vm.info"))["state"] == "Running"


async def test_what_the_vmm_refuses_at_boot_stands_in_the_error(microvm):
    (microvm.stays.image_directory / "stays").unlink()
    with pytest.raises(AgentError) as failed:
        await microvm.driver.apply(microvm.stays)
    assert failed.value.code == "vm.start_failed"
    assert await microvm.driver.vm_ids() == ()
    assert await microvm.driver.supervisor.names() == ()


async def test_a_disk_that_nobody_serves_costs_no_minute(microvm, tmp_path):
    disk = DiskAttachment(volume_id="vol_1", transport="vhost_user_blk", path=tmp_path / "disk.sock")
    began = time.monotonic()
    with pytest.raises(AgentError) as failed:
        await microvm.driver.apply(dataclasses.replace(microvm.stays, disks=(disk,)))
    assert (failed.value.code, failed.value.retryable) == ("vm.disk_unreachable", True)
    assert time.monotonic() - began < 10
    assert await microvm.driver.vm_ids() == ()


@pytest.mark.caps("netns")
async def test_it_gets_its_nics_as_descriptors(microvm, own_network):
    make_tap("bptap0", uid=UID)
    nics = (NicAttachment(nic=NIC, interface="bptap0", kind="tap"),)
    await microvm.driver.apply(dataclasses.replace(microvm.stays, nics=nics))
    told = await UnixHttp(socket_path=RunFiles(directory=microvm.stays.run_directory).api).call("GET", "vm.info")
    assert [net["mac"] for net in told["config"]["net"]] == [NIC.mac]


async def test_all_threads_are_confined(microvm):
    """By the kernel's word: seccomp filters on each thread, nobody's rights."""
    observed = await microvm.driver.apply(microvm.stays)
    if microvm.driver.program.fixed is None:
        pytest.skip("the stand-in has no seccomp filter")
    seen = []
    for status in Path(f"/proc/{observed.incarnation.pid}/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in status.read_text(encoding="ascii").splitlines())
        seen.append((fields["Seccomp"], fields["Uid"].split()[0], fields["CapEff"]))
    assert {uid for _, uid, _ in seen} == {str(UID)}
    assert {rights for _, _, rights in seen} == {"0" * 16}
    assert sum(mode == "2" for mode, _, _ in seen) >= len(seen) - 1


@pytest.mark.parametrize(
    ("said", "code"),
    [("51.1.0", "vm.vmm_too_old"), ("none", "vm.vmm_broken"), (None, "vm.vmm_missing")],
)
async def test_a_program_that_may_not_be_used_is_told_apart(paths, daemon, said, code):
    made = cloud_hypervisor(paths, daemon, is_real=False)
    install(paths, version=said)
    with pytest.raises(AgentError) as failed:
        await made.driver.apply(made.stays)
    assert (failed.value.code, failed.value.retryable) == (code, False)
    assert (await made.driver.missing()).startswith(code.removeprefix("vm."))
    assert await made.driver.vm_ids() == ()


@pytest.mark.parametrize("change", [{"boot": None}])
def test_what_it_cannot_do_is_refused_for_good(paths, daemon, change):
    made = cloud_hypervisor(paths, daemon, is_real=False)
    with pytest.raises(AgentError) as refused:
        made.driver.render(dataclasses.replace(made.stays, vm=dataclasses.replace(WANTED, **change)))
    assert (refused.value.code, refused.value.retryable) == ("vm.unsupported", False)
    with pytest.raises(AgentError):
        made.driver.render(dataclasses.replace(made.stays, is_kvm_usable=False))


@pytest.mark.parametrize(
    ("code", "number", "said", "reason", "words"),
    [
        (0, None, "VM guest exit event", "guest_poweroff", ""),
        (0, None, "VM exit event", "killed", "from outside"),
        (1, None, "Error: cannot map", "failed", "exit code 1: Error: cannot map"),
        (2, None, "unexpected argument", "failed", "arguments"),
        (None, 31, "si_syscall", "failed", "seccomp"),
        (None, 7, "", "failed", "memory"),
        (None, 9, "", "killed", "signal 9"),
        (None, None, "", "killed", ""),
    ],
)
def test_ends_are_told_apart(tmp_path, code, number, said, reason, words):
    files = RunFiles(directory=tmp_path)
    files.log.write_text(said, encoding="utf-8")
    unit = UnitObserved(name="microvm-" + VM, state="exited", incarnation=None, exit_code=code, exit_signal=number)
    ended = _ended(VM, unit, files, "")
    assert ended.exit_reason == reason
    assert words in ended.exit_detail


@pytest.mark.parametrize("microvm", ["checking"], indirect=True)
async def test_a_disk_comes_and_goes_while_it_runs(microvm, paths):
    """The configuration forgets it at once; it is gone when the guest has let it go."""
    socket = paths.run / "disk.sock"
    server = await asyncio.start_unix_server(lambda _reader, writer: writer.close(), socket)
    socket.chmod(0o777)
    driver, wanted = microvm.driver, microvm.stays.vm
    disk = DiskAttachment(volume_id="vol_1", transport="vhost_user_blk", path=socket)
    async with server:
        await driver.apply(microvm.stays)
        assert "vol_1" not in await driver.plugged(VM)
        for _ in range(2):
            await driver.plug(wanted, disk)
            assert "vol_1" in await driver.plugged(VM)
        assert not await driver.unplug(VM, "vol_1", seconds=0)
        assert await driver.unplug(VM, "vol_1", seconds=10)
        assert "vol_1" not in await driver.plugged(VM)
        assert await driver.unplug(VM, "vol_1", seconds=0)
        await driver.plug(wanted, disk)
    with pytest.raises(AgentError, match="nobody serves disk"):
        await driver.plug(wanted, dataclasses.replace(disk, volume_id="vol_2", path=paths.run / "none.sock"))
