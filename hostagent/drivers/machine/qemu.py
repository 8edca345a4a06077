"""VMs by QEMU: q35, KVM where the host's probe found it usable, else TCG.

The one rule: a machine starts paused (`-S`), gets its nics over QMP as descriptors of taps that the agent opened, and only
then runs; one found paused was left half-started by an agent that died, and is started anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from hostagent.drivers.machine import qemu_disks
from hostagent.drivers.machine.protocol import (
    DiskAttachment,
    MachineObserved,
    MachinePlan,
    MachineRendered,
    MachineTraits,
    RenderedFile,
)
from hostagent.drivers.machine.qemu_command import MAX_MOUNTS, RunFiles, nic_words, qemu_argv
from hostagent.drivers.machine.run_directory import prepare, write
from hostagent.drivers.machine.seed import WORKLOAD, seed_image, workload_text
from hostagent.drivers.network.tap import open_tap
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitObserved, UnitWanted
from hostagent.lib.files import tail
from hostagent.lib.logfile import trim
from hostagent.lib.paths import Paths
from hostagent.lib.qmp import Qmp, QmpError, connect
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import VmWanted

PREFIX = "vm-"
OVERHEAD_BYTES = 512 << 20
MONITOR_SECONDS = 30.0
POWER_OFF_SECONDS = 60.0
PRESS_SECONDS = 5.0
QUIT_SECONDS = 5.0
LOG_TAIL_BYTES = 1000
ENDED_BY_SIGNAL = "terminating on signal"


class QemuMachine:
    """`tsc_khz`, `kvm_groups`: facts of the host (`kvm.py`); `power_off_seconds`: the grace of an orderly power-off."""

    traits = MachineTraits(
        name="qemu",
        isolation="vm",
        disk_transport="vhost_user_blk",
        nic_kind="tap",
        mount_form="disk",
        boots=frozenset({"kernel", "firmware"}),
        can_hotplug=True,
        max_mounts=MAX_MOUNTS,
    )

    def __init__(
        self,
        supervisor: SupervisorDriver,
        paths: Paths,
        *,
        tsc_khz: int,
        kvm_groups: Callable[[], tuple[int, ...]] = tuple,
        power_off_seconds: float = POWER_OFF_SECONDS,
    ) -> None:
        self.supervisor = supervisor
        self.paths = paths
        self.tsc_khz = tsc_khz
        self.kvm_groups = kvm_groups
        self.power_off_seconds = power_off_seconds

    def render(self, plan: MachinePlan) -> MachineRendered:
        files = RunFiles(directory=plan.run_directory)
        unit = UnitWanted(
            name=PREFIX + plan.vm.id,
            argv=qemu_argv(plan, tsc_khz=self.tsc_khz),
            uid=plan.uid,
            gid=plan.gid,
            groups=self.kvm_groups() if plan.is_kvm_usable else (),
            log_path=files.log,
            limits=UnitLimits(
                cpu_cores=float(plan.vm.vcpus + 1),
                memory_bytes=plan.vm.memory_bytes + OVERHEAD_BYTES,
                cpus=plan.cpus,
                tasks=256 + 8 * plan.vm.vcpus,
            ),
        )
        texts = dict(plan.seed)
        if plan.vm.workload is not None:
            texts[WORKLOAD] = workload_text(plan.vm.workload)
        seed = (RenderedFile(path=files.seed, content=seed_image(texts), is_secret=True),) if texts else ()
        return MachineRendered(files=seed, units=(unit,))

    async def observe(self, vm_id: str) -> MachineObserved | None:
        unit = await self.supervisor.observe(PREFIX + vm_id)
        if unit is None:
            return None
        files = RunFiles(directory=self.paths.vm_run_directory(vm_id))
        log_path = str(self.paths.vm_log(vm_id))
        trim(self.paths.vm_log(vm_id))
        if unit.state == "running":
            return MachineObserved(
                vm_id=vm_id,
                state="running",
                incarnation=unit.incarnation,
                console_socket=str(files.console),
                log_path=log_path,
            )
        return _ended(vm_id, unit, files, log_path)

    async def apply(self, plan: MachinePlan) -> MachineObserved:
        vm_id = plan.vm.id
        observed = await self.observe(vm_id)
        is_running = observed is not None and observed.state == "running"
        if plan.vm.power == "stopped":
            if is_running:
                await self._power_off(vm_id)
            await self.supervisor.remove(PREFIX + vm_id)
            return MachineObserved(vm_id=vm_id, state="stopped", log_path=str(plan.log_path))
        if not is_running or await self._is_half_started(vm_id):
            await self._start(plan)
            observed = await self.observe(vm_id)
        assert observed is not None
        return observed

    async def remove(self, vm_id: str) -> None:
        observed = await self.observe(vm_id)
        if observed is not None and observed.state == "running":
            await self._quit(vm_id)
        await self.supervisor.remove(PREFIX + vm_id)
        shutil.rmtree(self.paths.vm_run_directory(vm_id), ignore_errors=True)

    async def vm_ids(self) -> tuple[str, ...]:
        return tuple(name.removeprefix(PREFIX) for name in await self.supervisor.names() if name.startswith(PREFIX))

    async def plugged(self, vm_id: str) -> frozenset[str]:
        return await qemu_disks.tell(self._qmp_path(vm_id), qemu_disks.plugged)

    async def plug(self, vm: VmWanted, disk: DiskAttachment) -> None:
        await qemu_disks.tell(self._qmp_path(vm.id), lambda qmp: qemu_disks.plug(qmp, disk))

    async def unplug(self, vm_id: str, volume_id: str, *, seconds: float) -> bool:
        return await qemu_disks.tell(self._qmp_path(vm_id), lambda qmp: qemu_disks.unplug(qmp, volume_id, seconds=seconds))

    async def unanswered(self, vm_id: str, volume_id: str) -> int | None:
        return await qemu_disks.tell(self._qmp_path(vm_id), lambda qmp: qemu_disks.unanswered(qmp, volume_id))

    async def reset(self, vm_id: str) -> None:
        await qemu_disks.tell(self._qmp_path(vm_id), qemu_disks.reset)

    def _qmp_path(self, vm_id: str) -> Path:
        return RunFiles(directory=self.paths.vm_run_directory(vm_id)).qmp

    async def _start(self, plan: MachinePlan) -> None:
        rendered = self.render(plan)
        name = rendered.units[-1].name
        await self.supervisor.remove(name)
        files = RunFiles(directory=plan.run_directory)
        prepare(plan, (files.qmp, files.console, files.log))
        for file in rendered.files:
            write(file, plan.uid, plan.gid)
        await self.supervisor.apply(rendered.units[-1])
        try:
            async with contextlib.AsyncExitStack() as stack:
                qmp = await self._monitor(plan.vm.id, stack)
                for index in range(len(plan.nics)):
                    await _plug_nic(qmp, index, plan)
                await qmp.execute("cont")
        except QmpError as error:
            await self.supervisor.remove(name)
            raise AgentError(
                "vm.start_failed", f"{error}; {tail(RunFiles(directory=plan.run_directory).log, LOG_TAIL_BYTES)}"
            ) from error

    async def _monitor(self, vm_id: str, stack: contextlib.AsyncExitStack) -> Qmp:
        """QEMU's monitor once it listens. Raises QmpError when QEMU ends before, or is not there in time."""
        path = RunFiles(directory=self.paths.vm_run_directory(vm_id)).qmp
        found: list[Qmp] = []
        failure = QmpError("unreachable", f"{path}: no monitor after {MONITOR_SECONDS:g} s")

        async def is_settled() -> bool:
            nonlocal failure
            try:
                found.append(await stack.enter_async_context(connect(path, seconds=MONITOR_SECONDS)))
            except QmpError as error:  # a socket can be there before anybody listens on it
                failure = error
                unit = await self.supervisor.observe(PREFIX + vm_id)
                return unit is None or unit.state == "exited"
            return True

        await until(is_settled, seconds=MONITOR_SECONDS)
        if not found:
            raise failure
        return found[0]

    async def _is_half_started(self, vm_id: str) -> bool:
        try:
            async with connect(RunFiles(directory=self.paths.vm_run_directory(vm_id)).qmp) as qmp:
                return (await qmp.execute("query-status"))["status"] == "prelaunch"
        except QmpError:
            return False  # a busy monitor is no reason to kill a machine

    async def _power_off(self, vm_id: str) -> None:
        """The power button, again and again because a guest that boots does not hear it yet; then the plug."""
        end = time.monotonic() + self.power_off_seconds
        with contextlib.suppress(QmpError):
            while (left := end - time.monotonic()) > 0:
                async with connect(RunFiles(directory=self.paths.vm_run_directory(vm_id)).qmp) as qmp:
                    await qmp.execute("system_powerdown")
                if await self._is_gone_within(vm_id, min(PRESS_SECONDS, left)):
                    return
        await self._quit(vm_id)

    async def _quit(self, vm_id: str) -> None:
        with contextlib.suppress(QmpError):
            async with connect(RunFiles(directory=self.paths.vm_run_directory(vm_id)).qmp, seconds=QUIT_SECONDS) as qmp:
                await qmp.execute("quit", seconds=QUIT_SECONDS)
            await self._is_gone_within(vm_id, QUIT_SECONDS)

    async def _is_gone_within(self, vm_id: str, seconds: float) -> bool:
        async def is_gone() -> bool:
            unit = await self.supervisor.observe(PREFIX + vm_id)
            return unit is None or unit.state == "exited"

        return await until(is_gone, seconds=seconds)


async def _plug_nic(qmp: Qmp, index: int, plan: MachinePlan) -> None:
    attachment = plan.nics[index]
    try:
        descriptor = open_tap(attachment.interface)
    except OSError as error:
        raise AgentError("vm.nic_failed", f"tap {attachment.interface}: {error}") from error
    try:
        await qmp.execute("getfd", {"fdname": f"tap{index}"}, descriptor=descriptor)
    finally:
        os.close(descriptor)
    for command, arguments in nic_words(index, attachment.nic, f"tap{index}"):
        await qmp.execute(command, arguments)


def _ended(vm_id: str, unit: UnitObserved, files: RunFiles, log_path: str) -> MachineObserved:
    """QEMU ends with 0 when the guest powered off, but also by SIGTERM: then its log says so."""
    said = tail(files.log, LOG_TAIL_BYTES)
    if unit.exit_code == 0 and ENDED_BY_SIGNAL not in said:
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="guest_poweroff", log_path=log_path)
    if unit.exit_code in (0, None):
        detail = f"signal {unit.exit_signal}" if unit.exit_signal else said.rpartition("\n")[2]
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="killed", exit_detail=detail, log_path=log_path)
    detail = f"exit code {unit.exit_code}: {said}"
    return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="failed", exit_detail=detail, log_path=log_path)
