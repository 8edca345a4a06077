"""MicroVMs by Cloud Hypervisor, driven over its socket.

The one rule: `vm.create` says yes to nearly everything; what `vm.boot` answers is the verdict. A VMM whose VM never booted was
left half-started by an agent that died, and is started anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostagent
from hostagent.drivers.machine.cloud_hypervisor_config import (
    DISK,
    MAX_MOUNTS,
    RunFiles,
    argv,
    disk_config,
    disk_id,
    net_config,
    vm_config,
)
from hostagent.drivers.machine.cloud_hypervisor_program import Program
from hostagent.drivers.machine.protocol import (
    DiskAttachment,
    MachineObserved,
    MachinePlan,
    MachineRendered,
    MachineTraits,
    RenderedFile,
)
from hostagent.drivers.machine.run_directory import prepare, write
from hostagent.drivers.machine.seed import WORKLOAD, seed_image, workload_text
from hostagent.drivers.network.tap import open_tap
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitObserved, UnitWanted
from hostagent.lib.files import tail
from hostagent.lib.logfile import trim
from hostagent.lib.paths import Paths
from hostagent.lib.unixhttp import UnixHttp, UnixHttpError, accepts
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import VmWanted

PREFIX = "microvm-"
CONSOLE_PREFIX = "console-"
OVERHEAD_BYTES = 512 << 20
API_SECONDS = 30.0
BOOT_SECONDS = 90.0  # a vhost-user disk that does not answer costs 60, and it was asked just before
POWER_OFF_SECONDS = 60.0
QUIT_SECONDS = 5.0
DISK_SECONDS = 2.0
LOG_TAIL_BYTES = 1000
ENDING_BYTES = 16_384
ENDED_BY_GUEST = "VM guest exit event"
KILLS = {
    signal.SIGSYS: "a system call that its seccomp filter forbids",
    signal.SIGBUS: "the host could not give it a page of memory",
    signal.SIGXFSZ: "a file grew over its limit",
}


class CloudHypervisorMachine:
    """`program`: which; `has_landlock`, `kvm_groups`: facts of the host; `python`, `code`: what runs the console's relay."""

    traits = MachineTraits(
        name="cloud_hypervisor",
        isolation="microvm",
        disk_transport="vhost_user_blk",
        nic_kind="tap",
        mount_form="disk",
        boots=frozenset({"kernel", "firmware"}),
        needs_kvm=True,
        can_hotplug=True,
        max_mounts=MAX_MOUNTS,
    )

    def __init__(
        self,
        supervisor: SupervisorDriver,
        paths: Paths,
        program: Program,
        *,
        has_landlock: bool,
        kvm_groups: Callable[[], tuple[int, ...]] = tuple,
        power_off_seconds: float = POWER_OFF_SECONDS,
        python: str = sys.executable,
        code: Path = Path(hostagent.__file__).parents[1],
    ) -> None:
        """Many parameters, because each is a fact of the host that a test gives otherwise."""
        self.supervisor = supervisor
        self.paths = paths
        self.program = program
        self.has_landlock = has_landlock
        self.kvm_groups = kvm_groups
        self.power_off_seconds = power_off_seconds
        self.python = python
        self.code = code

    async def missing(self) -> str:
        """Why this driver cannot be used here yet; "" when it can."""
        return await self.program.missing()

    def render(self, plan: MachinePlan) -> MachineRendered:
        files, vm = RunFiles(directory=plan.run_directory), plan.vm
        vm_config(plan, has_landlock=self.has_landlock)
        unit = UnitWanted(
            name=PREFIX + vm.id,
            argv=argv(self.program.path, plan.run_directory),
            uid=plan.uid,
            gid=plan.gid,
            groups=self.kvm_groups(),
            log_path=files.log,
            limits=UnitLimits(
                cpu_cores=float(vm.vcpus + 1),
                memory_bytes=vm.memory_bytes + OVERHEAD_BYTES,
                cpus=plan.cpus,
                tasks=256 + 8 * vm.vcpus,
            ),
        )
        texts = dict(plan.seed)
        if vm.workload is not None:
            texts[WORKLOAD] = workload_text(vm.workload)
        seed = (RenderedFile(path=files.seed, content=seed_image(texts), is_secret=True),) if texts else ()
        return MachineRendered(files=seed, units=(self._console(plan), unit))

    def _console(self, plan: MachinePlan) -> UnitWanted:
        files = RunFiles(directory=plan.run_directory)
        module = "hostagent.drivers.machine.console_relay"
        return UnitWanted(
            name=CONSOLE_PREFIX + plan.vm.id,
            argv=(self.python, "-m", module, str(files.serial), str(files.console), str(plan.log_path), str(plan.uid)),
            env={"PYTHONPATH": str(self.code), "PYTHONDONTWRITEBYTECODE": "1"},
            log_path=files.directory / "console.log",
            limits=UnitLimits(memory_bytes=64 << 20, tasks=4),
            stop_grace_seconds=1.0,
        )

    async def observe(self, vm_id: str) -> MachineObserved | None:
        unit = await self.supervisor.observe(PREFIX + vm_id)
        if unit is None:
            return None
        files, log_path = RunFiles(directory=self.paths.vm_run_directory(vm_id)), self.paths.vm_log(vm_id)
        trim(log_path)
        if unit.state == "exited":
            return _ended(vm_id, unit, files, str(log_path))
        trim(files.log)
        return MachineObserved(
            vm_id=vm_id,
            state="running",
            incarnation=unit.incarnation,
            console_socket=str(files.console),
            log_path=str(log_path),
        )

    async def apply(self, plan: MachinePlan) -> MachineObserved:
        vm_id = plan.vm.id
        observed = await self.observe(vm_id)
        is_running = observed is not None and observed.state == "running"
        if plan.vm.power == "stopped":
            if is_running:
                await self._power_off(vm_id)
            await self._forget(vm_id)
            return MachineObserved(vm_id=vm_id, state="stopped", log_path=str(plan.log_path))
        if is_running and not await self._is_half_started(vm_id):
            await self.supervisor.apply(self._console(plan))
            assert observed is not None
            return observed
        await self._start(plan)
        observed = await self.observe(vm_id)
        assert observed is not None
        return observed

    async def remove(self, vm_id: str) -> None:
        observed = await self.observe(vm_id)
        if observed is not None and observed.state == "running":
            await self._quit(vm_id)
        await self._forget(vm_id)
        shutil.rmtree(self.paths.vm_run_directory(vm_id), ignore_errors=True)

    async def vm_ids(self) -> tuple[str, ...]:
        return tuple(name.removeprefix(PREFIX) for name in await self.supervisor.names() if name.startswith(PREFIX))

    async def plugged(self, vm_id: str) -> frozenset[str]:
        """By the tree of devices: the configuration forgets a disk before the guest has let it go."""
        try:
            info = await UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api).call("GET", "vm.info")
        except UnixHttpError as error:
            raise AgentError("vm.plug_failed", str(error)) from error
        return frozenset(name.removeprefix(DISK) for name in info.get("device_tree") or () if name.startswith(DISK))

    async def plug(self, vm: VmWanted, disk: DiskAttachment) -> None:
        if disk.volume_id in await self.plugged(vm.id):
            return
        await _check_disks((disk,))
        try:
            await self._told(vm.id, "vm.add-disk", disk_config(disk, vm.vcpus))
        except UnixHttpError as error:
            raise AgentError("vm.plug_failed", str(error)) from error

    async def unplug(self, vm_id: str, volume_id: str, *, seconds: float) -> bool:
        """`vm.remove-device` answers at once, and a second one while the guest is asked is an error that says nothing."""

        async def is_gone() -> bool:
            return volume_id not in await self.plugged(vm_id)

        if await is_gone():
            return True
        with contextlib.suppress(UnixHttpError):
            await self._told(vm_id, "vm.remove-device", {"id": disk_id(volume_id)})
        return await until(is_gone, seconds=seconds)

    async def unanswered(self, vm_id: str, volume_id: str) -> int | None:
        """It tells nothing of its rings."""
        del vm_id, volume_id

    async def reset(self, vm_id: str) -> None:
        try:
            await UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api).call(
                "PUT", "vm.reboot", seconds=BOOT_SECONDS
            )
        except UnixHttpError as error:
            raise AgentError("vm.plug_failed", str(error)) from error

    async def _told(self, vm_id: str, name: str, body: dict[str, Any]) -> None:
        api = UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api)
        await api.call("PUT", name, body, seconds=BOOT_SECONDS)

    async def _start(self, plan: MachinePlan) -> None:
        await self.program.check()
        rendered = self.render(plan)
        await self._forget(plan.vm.id)
        await _check_disks(plan.disks)
        files = RunFiles(directory=plan.run_directory)
        stale = (files.api, files.events, files.serial, files.console, files.log, files.directory / "api.sock.lock")
        prepare(plan, stale)
        for file in rendered.files:
            write(file, plan.uid, plan.gid)
        for unit in rendered.units:
            await self.supervisor.apply(unit)
        try:
            await self._boot(plan)
        except UnixHttpError as error:
            said = tail(files.log, LOG_TAIL_BYTES)
            await self._forget(plan.vm.id)
            raise AgentError("vm.start_failed", f"{error}; {said}") from error

    async def _boot(self, plan: MachinePlan) -> None:
        """Create, plug, boot. Raises UnixHttpError with the VMM's chain of causes."""
        api = await self._api(plan.vm.id)
        await api.call("PUT", "vm.create", vm_config(plan, has_landlock=self.has_landlock))
        for index, attachment in enumerate(plan.nics):
            try:
                descriptor = open_tap(attachment.interface)
            except OSError as error:
                raise AgentError("vm.nic_failed", f"tap {attachment.interface}: {error}") from error
            try:
                await api.call("PUT", "vm.add-net", net_config(index, attachment.nic), descriptors=(descriptor,))
            finally:
                os.close(descriptor)
        await api.call("PUT", "vm.boot", seconds=BOOT_SECONDS)

    async def _api(self, vm_id: str) -> UnixHttp:
        """Once it answers. Raises UnixHttpError when the VMM ends before, or is not there in time."""
        api = UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api)
        failure = UnixHttpError(0, f"{api.socket_path}: nobody answers after {API_SECONDS:g} s")
        is_up = False

        async def is_settled() -> bool:
            nonlocal is_up, failure
            try:
                await api.call("GET", "vmm.ping")
            except UnixHttpError as error:
                failure = error
                unit = await self.supervisor.observe(PREFIX + vm_id)
                return unit is None or unit.state == "exited"
            is_up = True
            return True

        await until(is_settled, seconds=API_SECONDS)
        if not is_up:
            raise failure
        return api

    async def _is_half_started(self, vm_id: str) -> bool:
        api = UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api)
        try:
            return (await api.call("GET", "vm.info"))["state"] == "Created"
        except UnixHttpError as error:
            return error.status == 404  # any other silence is no reason to kill a machine: one long call blocks all others

    async def _power_off(self, vm_id: str) -> None:
        """The power button, which a guest may ignore, then the plug."""
        api = UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api)
        with contextlib.suppress(UnixHttpError):
            await api.call("PUT", "vm.power-button")
            if await self._is_gone_within(vm_id, self.power_off_seconds):
                return
        await self._quit(vm_id)

    async def _quit(self, vm_id: str) -> None:
        api = UnixHttp(socket_path=RunFiles(directory=self.paths.vm_run_directory(vm_id)).api)
        with contextlib.suppress(UnixHttpError):
            await api.call("PUT", "vmm.shutdown", seconds=QUIT_SECONDS)
            await self._is_gone_within(vm_id, QUIT_SECONDS)

    async def _is_gone_within(self, vm_id: str, seconds: float) -> bool:
        async def is_gone() -> bool:
            unit = await self.supervisor.observe(PREFIX + vm_id)
            return unit is None or unit.state == "exited"

        return await until(is_gone, seconds=seconds)

    async def _forget(self, vm_id: str) -> None:
        await self.supervisor.remove(PREFIX + vm_id)
        await self.supervisor.remove(CONSOLE_PREFIX + vm_id)


async def _check_disks(disks: tuple[DiskAttachment, ...]) -> None:
    """Cloud Hypervisor tries for a minute to reach a disk's daemon, and answers nothing else meanwhile."""
    for disk in disks:
        if not await accepts(disk.path, seconds=DISK_SECONDS):
            raise AgentError(
                "vm.disk_unreachable", f"nobody serves disk {disk.volume_id} at {disk.path}", volume=disk.volume_id
            )


def _ended(vm_id: str, unit: UnitObserved, files: RunFiles, log_path: str) -> MachineObserved:
    """0 is a power-off by the guest, but also an end by a signal or by the API: its log tells them apart."""
    said = tail(files.log, ENDING_BYTES)
    last = said.strip()[-LOG_TAIL_BYTES:]
    if unit.exit_code == 0 and ENDED_BY_GUEST in said:
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="guest_poweroff", log_path=log_path)
    if unit.exit_code == 0:
        return MachineObserved(
            vm_id=vm_id, state="stopped", exit_reason="killed", exit_detail="ended from outside", log_path=log_path
        )
    if unit.exit_code is not None:
        what = "arguments that this version does not know" if unit.exit_code == 2 else f"exit code {unit.exit_code}"
        return MachineObserved(
            vm_id=vm_id, state="stopped", exit_reason="failed", exit_detail=f"{what}: {last}", log_path=log_path
        )
    number = unit.exit_signal or 0
    cause = KILLS.get(signal.Signals(number)) if number else None
    detail = f"signal {number}" + (f": {cause}; {last}" if cause else "") if number else ""
    reason = "failed" if cause else "killed"
    return MachineObserved(vm_id=vm_id, state="stopped", exit_reason=reason, exit_detail=detail, log_path=log_path)
