"""Every machine driver: started once, left alone while it runs, its end told truly, gone when removed.

The guests are as small as can be: a VM's kernel runs one static program made here, a container one program of busybox.
"""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import signal
import struct
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hostagent.drivers.machine import kvm
from hostagent.drivers.machine.cloud_hypervisor import CloudHypervisorMachine
from hostagent.drivers.machine.cloud_hypervisor_program import Program, has_landlock
from hostagent.drivers.machine.container import ContainerMachine
from hostagent.drivers.machine.fake import FakeMachine
from hostagent.drivers.machine.protocol import MachineDriver, MachineObserved, MachinePlan
from hostagent.drivers.machine.qemu import QemuMachine
from hostagent.drivers.supervisor.fake import FakeSupervisor
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import Generation, KernelBoot, SeedWanted, VmWanted, WorkloadWanted
from provisioning.images.build import build
from provisioning.images.manifest import read_manifest
from tests.conformance import vmm
from tests.conformance.conftest import Daemon

pytestmark = pytest.mark.timeout(900)  # the first run on a machine builds the guest image
VM = "vm_1"
UID = 0x7800_0000
BOOT_SECONDS = 60
STAND_IN_PYTHON = next(path for path in ("/usr/bin/python3", sys.executable) if Path(path).exists())  # machines' users run it
WANTED = VmWanted(
    id=VM,
    generation=Generation(epoch=1, number=1),
    driver="fake",
    vcpus=1,
    memory_bytes=128 << 20,
    image_id="img_1",
    boot=None,
    disks=(),
    nics=(),
    seed=SeedWanted(hostname="small"),
)


@dataclass
class Bench:
    """A driver and plans for it: `stays` runs until it is stopped, `ends` ends by itself with success."""

    driver: MachineDriver
    stays: MachinePlan
    ends: MachinePlan | None

    async def until_stopped(self, *, seconds: float = BOOT_SECONDS) -> MachineObserved:
        found: list[MachineObserved] = []

        async def has_stopped() -> bool:
            observed = await self.driver.observe(VM)
            if observed is not None and observed.state == "stopped":
                found.append(observed)
            return bool(found)

        assert await until(has_stopped, seconds=seconds)
        return found[0]

    async def kill(self) -> None:
        observed = await self.driver.observe(VM)
        assert observed is not None
        assert observed.incarnation is not None
        if isinstance(self.driver, FakeMachine) and isinstance(self.driver.supervisor, FakeSupervisor):
            self.driver.supervisor.die("fakevm-" + VM)
        else:
            os.kill(observed.incarnation.pid, signal.SIGKILL)


PARAMS = [
    "fake",
    pytest.param("checking_cloud_hypervisor", marks=[pytest.mark.caps("root")]),
    pytest.param("cloud_hypervisor", marks=[pytest.mark.caps("root", "cloud_hypervisor")]),
    pytest.param("qemu", marks=[pytest.mark.caps("root", "qemu", "debootstrap")]),
    pytest.param("container", marks=[pytest.mark.caps("root", "runc", "busybox")]),
]


@pytest.fixture(params=PARAMS)
async def bench(request: pytest.FixtureRequest, paths: Paths, daemon: Daemon) -> AsyncIterator[Bench]:
    makers = {
        "fake": _fake,
        "qemu": _qemu,
        "container": _container,
        "checking_cloud_hypervisor": partial(cloud_hypervisor, is_real=False),
        "cloud_hypervisor": partial(cloud_hypervisor, is_real=True),
    }
    made = makers[request.param](paths, daemon)
    yield made
    await made.driver.remove(VM)


def _plan(paths: Paths, wanted: VmWanted) -> MachinePlan:
    paths.image_directory("img_1").mkdir(parents=True, exist_ok=True)
    return MachinePlan(
        vm=wanted,
        disks=(),
        nics=(),
        image_directory=paths.image_directory("img_1"),
        run_directory=paths.vm_run_directory(VM),
        state_directory=paths.vm_directory(VM),
        log_path=paths.vm_log(VM),
        uid=UID,
        gid=UID,
        uid_count=65_536,
    )


def _fake(paths: Paths, daemon: Daemon) -> Bench:
    del daemon
    return Bench(driver=FakeMachine(FakeSupervisor()), stays=_plan(paths, WANTED), ends=None)


def _qemu(paths: Paths, daemon: Daemon) -> Bench:
    image = build()
    plan = _plan(paths, WANTED)
    shutil.copyfile(image / read_manifest(image).boot.kernel_file, plan.image_directory / "vmlinux")
    power_off = struct.pack("<I", 0x4321FEDC)  # LINUX_REBOOT_CMD_POWER_OFF
    endless = kvm.probe_program().replace(b"\x0f\x05\xbf\xad\xde\xe1\xfe", b"\xeb\xfe\xbf\xad\xde\xe1\xfe")
    programs = {"ends": kvm.probe_program().replace(struct.pack("<I", 0x01234567), power_off), "stays": endless}
    plans = {}
    for name, program in programs.items():
        (plan.image_directory / name).write_bytes(kvm.initramfs_of(program))
        boot = KernelBoot(kernel_file="vmlinux", initramfs_file=name, cmdline="console=ttyS0 quiet panic=-1")
        plans[name] = dataclasses.replace(plan, vm=dataclasses.replace(WANTED, driver="qemu", boot=boot))
    driver = QemuMachine(daemon.driver, paths, tsc_khz=kvm.tsc_khz(), power_off_seconds=1.0)
    return Bench(driver=driver, **plans)


def install(paths: Paths, *, version: str | None = "53.0.0") -> None:
    """The stand-in for the VMM where enrolment puts the real one; None: nothing."""
    directory = paths.programs / "cloud-hypervisor" / "0" / "cloud-hypervisor"
    directory.unlink(missing_ok=True)
    if version is None:
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(vmm.__file__).with_name("cloud_hypervisor_api.json"), directory.parent)
    source = Path(vmm.__file__).read_text(encoding="utf-8").replace('os.environ.get("FAKE_VERSION")', f'"{version}"')
    directory.write_text(f"#!{STAND_IN_PYTHON}\n{source}", encoding="utf-8")
    directory.chmod(0o755)


def pvh_kernel(code: bytes) -> bytes:
    """A kernel of a few instructions, entered in 32-bit mode. Source: Xen, PVH boot ABI (XEN_ELFNOTE_PHYS32_ENTRY)."""
    base, headers, note_bytes = 0x100000, 64 + 2 * 56, 24
    note = (struct.pack("<III", 4, 4, 18) + b"Xen\0" + struct.pack("<I", base + headers + note_bytes)).ljust(note_bytes, b"\0")
    size = headers + note_bytes + len(code)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + headers + note_bytes, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 7, 0, base, base, size, size, 0x1000)
    noted = struct.pack("<IIQQQQQQ", 4, 4, headers, base + headers, base + headers, 20, 20, 4)
    return head + load + noted + note + code


def cloud_hypervisor(paths: Paths, daemon: Daemon, *, is_real: bool) -> Bench:
    """Guests that say a word on the serial port, and then power off (or rest)."""
    plan = dataclasses.replace(_plan(paths, WANTED), is_kvm_usable=True, seed={"meta-data": "x"})
    word = b"".join(b"\x66\xba\xf8\x03\xb0" + bytes([letter]) + b"\xee" for letter in b"hi\n")
    plans = {}
    for name, rest in {"ends": vmm.POWER_OFF, "stays": b""}.items():
        (plan.image_directory / name).write_bytes(pvh_kernel(word + rest + b"\xf4\xeb\xfd"))
        boot = KernelBoot(kernel_file=name, initramfs_file="", cmdline="")
        plans[name] = dataclasses.replace(plan, vm=dataclasses.replace(WANTED, driver="cloud_hypervisor", boot=boot))
    fixed = Path(os.environ["BEDPLATE_CLOUD_HYPERVISOR"]) if is_real else None
    if not is_real:
        install(paths)
    driver = CloudHypervisorMachine(
        daemon.driver,
        paths,
        Program(paths=paths, fixed=fixed),
        has_landlock=has_landlock(),
        kvm_groups=kvm.device_groups,
        power_off_seconds=1.0,
    )
    return Bench(driver=driver, **plans)


def _container(paths: Paths, daemon: Daemon) -> Bench:
    plan = _plan(paths, WANTED)
    with tarfile.open(plan.image_directory / "root.tar", "w") as archive:
        for directory in ("bin", "dev", "etc", "proc", "sys", "tmp", "var"):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        content = Path(shutil.which("busybox") or "").read_bytes()
        entry = tarfile.TarInfo("bin/sleep")
        entry.size, entry.mode = len(content), 0o755
        archive.addfile(entry, io.BytesIO(content))

    def running(*argv: str) -> MachinePlan:
        workload = WorkloadWanted(argv=argv, secret_env={"TOKEN": "planted"})
        return dataclasses.replace(plan, vm=dataclasses.replace(WANTED, driver="container", workload=workload))

    driver = ContainerMachine(daemon.driver, paths)
    return Bench(driver=driver, stays=running("/bin/sleep", "600"), ends=running("/bin/sleep", "0"))


async def test_a_machine_nobody_asked_for_is_absent(bench):
    assert await bench.driver.observe(VM) is None
    assert await bench.driver.vm_ids() == ()
    await bench.driver.remove(VM)


async def test_a_running_machine_is_left_alone(bench):
    first = await bench.driver.apply(bench.stays)
    changed = dataclasses.replace(bench.stays, vm=dataclasses.replace(bench.stays.vm, memory_bytes=256 << 20))
    again = await bench.driver.apply(changed)

    assert first.state == "running"
    assert again.incarnation == first.incarnation
    assert (await bench.driver.observe(VM)).incarnation == first.incarnation
    assert await bench.driver.vm_ids() == (VM,)


async def test_a_killed_machine_says_so_and_starts_anew(bench):
    first = await bench.driver.apply(bench.stays)
    await bench.kill()

    assert (await bench.until_stopped()).exit_reason == "killed"
    second = await bench.driver.apply(bench.stays)
    assert second.state == "running"
    assert second.incarnation != first.incarnation


async def test_a_machine_that_ends_by_itself_says_so(bench):
    if bench.ends is None:
        pytest.skip("the fake has no guest")
    await bench.driver.apply(bench.ends)

    assert (await bench.until_stopped()).exit_reason == "guest_poweroff"


async def test_a_machine_is_stopped_also_when_its_guest_does_not_listen(bench):
    await bench.driver.apply(bench.stays)
    stopped = dataclasses.replace(bench.stays, vm=dataclasses.replace(bench.stays.vm, power="stopped"))
    for _ in range(2):
        assert (await bench.driver.apply(stopped)).state == "stopped"
    observed = await bench.driver.observe(VM)
    assert observed is None or observed.state == "stopped"


async def test_a_removed_machine_leaves_nothing(bench, paths):
    await bench.driver.apply(bench.stays)
    await bench.driver.remove(VM)

    assert await bench.driver.observe(VM) is None
    assert await bench.driver.vm_ids() == ()
    assert not [path for path in paths.vm_run_directory(VM).rglob("*") if path.is_socket()]
    await bench.driver.remove(VM)


@pytest.mark.caps("root", "qemu", "debootstrap")
class TestQemu:
    @pytest.fixture
    def qemu(self, paths, daemon) -> Bench:
        return _qemu(paths, daemon)

    async def test_sigterm_from_outside_is_no_power_off_of_the_guest(self, qemu):
        observed = await qemu.driver.apply(qemu.stays)
        os.kill(observed.incarnation.pid, signal.SIGTERM)

        ended = await qemu.until_stopped()
        assert ended.exit_reason == "killed"
        assert "signal 15" in ended.exit_detail

    async def test_a_half_started_machine_is_started_anew(self, qemu):
        """As an agent leaves it that died between start and `cont`."""
        unit = qemu.driver.render(qemu.ends).units[-1]
        qemu.ends.run_directory.mkdir(parents=True)
        os.chown(qemu.ends.run_directory, UID, UID)
        qemu.ends.log_path.parent.mkdir(parents=True)
        qemu.ends.log_path.touch()
        os.chown(qemu.ends.log_path, UID, UID)
        await qemu.driver.supervisor.apply(unit)
        paused = await qemu.driver.observe(VM)

        async def is_listening() -> bool:
            return (qemu.ends.run_directory / "qmp.sock").exists()

        assert await until(is_listening, seconds=30)
        started = await qemu.driver.apply(qemu.ends)
        assert started.incarnation != paused.incarnation
        assert (await qemu.until_stopped()).exit_reason == "guest_poweroff"

    async def test_what_qemu_said_stands_in_the_error(self, qemu):
        (qemu.stays.image_directory / "stays").unlink()
        with pytest.raises(AgentError) as failed:
            await qemu.driver.apply(qemu.stays)
        assert failed.value.code == "vm.start_failed"
        assert "stays" in failed.value.message
        assert await qemu.driver.vm_ids() == ()

    async def test_a_kernel_that_runs_is_found_and_one_that_does_not_is_named(self, qemu, tmp_path):
        kernel = qemu.stays.image_directory / "vmlinux"
        (tmp_path / "noise").write_bytes(bytes(4096))

        usable = await kvm.probe_kvm((kernel,), tsc_khz=kvm.tsc_khz(), device=Path("/dev/null"), accelerator="tcg")
        broken = await kvm.probe_kvm((tmp_path / "noise",), tsc_khz=1, device=Path("/dev/null"), accelerator="tcg")
        absent = await kvm.probe_kvm((kernel,), tsc_khz=1, device=tmp_path / "kvm")
        without = await kvm.probe_kvm((), tsc_khz=1, device=Path("/dev/null"))
        assert (usable.usable, usable.reason) == (True, "")
        assert not broken.usable
        assert broken.reason
        assert (absent.device_present, without.reason) == (False, kvm.NO_KERNEL)
