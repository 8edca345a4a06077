"""Containers by runc: own user, network, mount, pid, ipc, uts and cgroup namespaces; native speed, weaker isolation.

The one rule: the unit is a starter that becomes runc (`container_start`), so whatever was mounted or made for a container
ends with it. runc killed from outside leaves its container behind: it is deleted by force before every start and after
every end.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import hostagent
from hostagent.drivers.machine.container_config import bundle_config, host_file_texts, network_setup
from hostagent.drivers.machine.protocol import MachineObserved, MachinePlan, MachineRendered, MachineTraits, RenderedFile
from hostagent.drivers.machine.tree import archive_of, unpack
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitLimits, UnitObserved, UnitWanted
from hostagent.lib.files import tail
from hostagent.lib.lock import KeyedLocks
from hostagent.lib.logfile import trim
from hostagent.lib.paths import Paths
from hostagent.lib.program import run
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError

RUNC = "/usr/sbin/runc"
PREFIX = "container-"
LIMITS = frozenset({"cpu", "memory", "pids"})
STOP_SECONDS = 10.0
DELETE_SECONDS = 30.0
LINKS_GONE_SECONDS = 5.0
LOG_TAIL_BYTES = 500


class ContainerMachine:
    """`limits`: the controllers that can be used here. `python`, `code`: what runs the starter: an interpreter, and the
    agent's archive or tree.
    """

    traits = MachineTraits(
        name="container",
        isolation="container",
        disk_transport="file",
        nic_kind="veth",
        mount_form="directory",
        boots=frozenset({"none"}),
        has_console=False,
        needs_workload=True,
    )

    def __init__(
        self,
        supervisor: SupervisorDriver,
        paths: Paths,
        *,
        limits: frozenset[str] = LIMITS,
        python: str = sys.executable,
        code: Path = Path(hostagent.__file__).parents[1],
    ) -> None:
        self.supervisor = supervisor
        self.paths = paths
        self.limits = limits
        self.python = python
        self.code = code
        self._changing = KeyedLocks()

    def render(self, plan: MachinePlan) -> MachineRendered:
        """The tree's name depends on the archive, so the starter's own file is written by `apply`."""
        directory = plan.run_directory
        config = bundle_config(plan, directory / "root")
        resources = config["linux"]["resources"]
        config["linux"]["resources"] = {name: value for name, value in resources.items() if name in self.limits}
        if not self.limits:
            del config["linux"]["cgroupsPath"]
        files = [RenderedFile(path=directory / "config.json", content=json.dumps(config).encode(), is_secret=True)]
        files += [RenderedFile(path=directory / name, content=text.encode()) for name, text in host_file_texts(plan).items()]
        files += [
            RenderedFile(path=directory / "seed" / name, content=text.encode(), is_secret=True)
            for name, text in sorted(plan.seed.items())
        ]
        unit = UnitWanted(
            name=PREFIX + plan.vm.id,
            argv=(self.python, "-m", "hostagent.drivers.machine.container_start", str(directory / "start.json")),
            env={"PYTHONPATH": str(self.code), "PYTHONDONTWRITEBYTECODE": "1"},
            log_path=plan.log_path,
            limits=UnitLimits(cpus=plan.cpus),
            stop_grace_seconds=STOP_SECONDS,
        )
        return MachineRendered(files=tuple(files), units=(unit,))

    async def observe(self, vm_id: str) -> MachineObserved | None:
        unit = await self.supervisor.observe(PREFIX + vm_id)
        if unit is None:
            return None
        log_path = self.paths.vm_log(vm_id)
        trim(log_path)
        if unit.state == "running":
            return MachineObserved(vm_id=vm_id, state="running", incarnation=unit.incarnation, log_path=str(log_path))
        async with self._changing.hold(vm_id):
            now = await self.supervisor.observe(PREFIX + vm_id)
            if now is None or now.state == "exited":
                await self._delete(vm_id)
        return _ended(vm_id, unit, log_path)

    async def apply(self, plan: MachinePlan) -> MachineObserved:
        vm_id = plan.vm.id
        if plan.vm.power == "stopped":
            async with self._changing.hold(vm_id):
                await self._stop(vm_id)
            return MachineObserved(vm_id=vm_id, state="stopped", log_path=str(plan.log_path))
        observed = await self.observe(vm_id)
        if observed is None or observed.state != "running":
            await self._unpack_and_start(plan)
            observed = await self.observe(vm_id)
        assert observed is not None
        return observed

    async def remove(self, vm_id: str) -> None:
        async with self._changing.hold(vm_id):
            await self._stop(vm_id)
        shutil.rmtree(self.paths.vm_run_directory(vm_id), ignore_errors=True)
        for tree in self.paths.vm_directory(vm_id).glob("tree-*"):
            shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(self.paths.vm_directory(vm_id) / "scratch", ignore_errors=True)

    async def vm_ids(self) -> tuple[str, ...]:
        return tuple(name.removeprefix(PREFIX) for name in await self.supervisor.names() if name.startswith(PREFIX))

    async def _unpack_and_start(self, plan: MachinePlan) -> None:
        plan.state_directory.mkdir(parents=True, exist_ok=True)
        archive = archive_of(plan.root.source if plan.root is not None else plan.image_directory)
        tree = await unpack(archive, plan.state_directory, uid=plan.uid, gid=plan.gid, count=plan.uid_count)
        async with self._changing.hold(plan.vm.id):
            await self._start(plan, tree)

    async def _start(self, plan: MachinePlan, tree: Path) -> None:
        rendered = self.render(plan)
        await self._stop(plan.vm.id)
        for nic in plan.nics:
            if not _has_interface(nic.peer):
                raise AgentError("vm.nic_gone", f"the link {nic.interface} went with the container that used it")
        plan.run_directory.mkdir(parents=True, exist_ok=True)
        os.chown(plan.run_directory, plan.uid, plan.gid)
        for file in rendered.files:
            _write(file, plan)
        start = {
            "lower": str(tree),
            "scratch": str(plan.state_directory / "scratch"),
            "root": str(plan.run_directory / "root"),
            "uid": plan.uid,
            "gid": plan.gid,
            "nics": network_setup(plan),
            "runc": [*self._runc(), "run", "--bundle", str(plan.run_directory), plan.vm.id],
        }
        (plan.run_directory / "start.json").write_text(json.dumps(start), encoding="utf-8")
        await self.supervisor.apply(rendered.units[-1])

    async def _stop(self, vm_id: str) -> None:
        await self.supervisor.remove(PREFIX + vm_id)
        await self._delete(vm_id)

    async def _delete(self, vm_id: str) -> None:
        """What a dead container left, and its links: they go with its network namespace, which the kernel takes down later."""
        start, state = self.paths.vm_run_directory(vm_id) / "start.json", self.paths.run / "runc" / vm_id
        if not start.exists():
            return
        if state.exists():
            await run(*self._runc(), "delete", "--force", vm_id, deadline_seconds=DELETE_SECONDS, check=False)
            await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)
        nics = json.loads(start.read_bytes())["nics"]
        start.unlink()

        async def are_links_gone() -> bool:
            return not any(_has_interface(nic["interface"]) and not _has_interface(nic["peer"]) for nic in nics)

        await until(are_links_gone, seconds=LINKS_GONE_SECONDS)

    def _runc(self) -> list[str]:
        """Without cgroups runc is told to go on without them."""
        words = [RUNC, "--root", str(self.paths.run / "runc")]
        return words if self.limits else [*words, "--rootless", "true"]


def _ended(vm_id: str, unit: UnitObserved, log_path: Path) -> MachineObserved:
    """128 + n is runc's word for a workload that signal n ended."""
    said = _last_lines(log_path)
    if unit.exit_code == 0:
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="guest_poweroff", log_path=str(log_path))
    if unit.exit_code is None or unit.exit_code > 128:
        number = unit.exit_signal or (unit.exit_code or 128) - 128
        detail = f"signal {number}: {said}"
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="killed", exit_detail=detail, log_path=str(log_path))
    detail = f"exit code {unit.exit_code}: {said}"
    return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="failed", exit_detail=detail, log_path=str(log_path))


def _write(file: RenderedFile, plan: MachinePlan) -> None:
    """runc, which is root, reads the configuration; the rest is for the container's root."""
    file.path.parent.mkdir(exist_ok=True)
    file.path.unlink(missing_ok=True)
    descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400 if file.is_secret else 0o444)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(file.content)
        if file.path.name != "config.json":
            os.fchown(opened.fileno(), plan.uid, plan.gid)


def _has_interface(name: str) -> bool:
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def _last_lines(path: Path) -> str:
    return "\n".join(tail(path, LOG_TAIL_BYTES).splitlines()[-3:])
