"""A machine that is a sleeping process under whatever supervisor it is given: the whole life, no guest."""

from __future__ import annotations

from hostagent.drivers.fault import Faults
from hostagent.drivers.machine.protocol import (
    DiskAttachment,
    MachineObserved,
    MachinePlan,
    MachineRendered,
    MachineTraits,
    RenderedFile,
)
from hostagent.drivers.supervisor.protocol import SupervisorDriver, UnitWanted
from hostagent.protocol.wanted import VmWanted

_PREFIX = "fakevm-"


class FakeMachine:
    traits = MachineTraits(
        name="fake",
        isolation="vm",
        disk_transport="vhost_user_blk",
        nic_kind="tap",
        mount_form="directory",
        boots=frozenset({"kernel", "firmware", "none"}),
        has_console=False,
        can_hotplug=True,
    )

    def __init__(self, supervisor: SupervisorDriver, faults: Faults | None = None) -> None:
        self.supervisor = supervisor
        self.faults = faults or Faults()
        self.plans: dict[str, MachinePlan] = {}
        self.disks: dict[str, set[str]] = {}
        self.kept: set[str] = set()

    def render(self, plan: MachinePlan) -> MachineRendered:
        seed = tuple(
            RenderedFile(path=plan.run_directory / name, content=text.encode(), is_secret=True)
            for name, text in sorted(plan.seed.items())
        )
        unit = UnitWanted(
            name=_PREFIX + plan.vm.id, argv=("/bin/sleep", "infinity"), uid=plan.uid, gid=plan.gid, log_path=plan.log_path
        )
        return MachineRendered(files=seed, units=(unit,))

    async def observe(self, vm_id: str) -> MachineObserved | None:
        await self.faults.reach("machine.observe", vm_id)
        unit = await self.supervisor.observe(_PREFIX + vm_id)
        if unit is None:
            return None
        plan = self.plans.get(vm_id)
        log_path = str(plan.log_path) if plan else ""
        if unit.state == "running":
            return MachineObserved(vm_id=vm_id, state="running", incarnation=unit.incarnation, log_path=log_path)
        if unit.exit_code == 0:
            return MachineObserved(vm_id=vm_id, state="stopped", exit_reason="guest_poweroff", log_path=log_path)
        reason = "killed" if unit.exit_code is None else "failed"
        detail = f"signal {unit.exit_signal}" if unit.exit_code is None else f"exit code {unit.exit_code}"
        return MachineObserved(vm_id=vm_id, state="stopped", exit_reason=reason, exit_detail=detail, log_path=log_path)

    async def apply(self, plan: MachinePlan) -> MachineObserved:
        await self.faults.reach("machine.apply", plan.vm.id)
        self.plans[plan.vm.id] = plan
        if plan.vm.power == "stopped":
            await self.supervisor.remove(_PREFIX + plan.vm.id)
            return MachineObserved(vm_id=plan.vm.id, state="stopped", log_path=str(plan.log_path))
        before = await self.observe(plan.vm.id)
        for unit in self.render(plan).units:
            await self.supervisor.apply(unit)
        if before is None or before.state != "running":
            self.disks[plan.vm.id] = {disk.volume_id for disk in plan.disks}
        observed = await self.observe(plan.vm.id)
        assert observed is not None
        return observed

    async def remove(self, vm_id: str) -> None:
        await self.faults.reach("machine.remove", vm_id)
        await self.supervisor.remove(_PREFIX + vm_id)
        self.plans.pop(vm_id, None)

    async def plugged(self, vm_id: str) -> frozenset[str]:
        return frozenset(self.disks.get(vm_id, ()))

    async def plug(self, vm: VmWanted, disk: DiskAttachment) -> None:
        await self.faults.reach("machine.plug", disk.volume_id)
        self.disks.setdefault(vm.id, set()).add(disk.volume_id)

    async def unplug(self, vm_id: str, volume_id: str, *, seconds: float) -> bool:
        """Its guest keeps what is in `kept`."""
        del seconds
        await self.faults.reach("machine.unplug", volume_id)
        if volume_id in self.kept:
            return False
        self.disks.get(vm_id, set()).discard(volume_id)
        return True

    async def vm_ids(self) -> tuple[str, ...]:
        names = await self.supervisor.names()
        return tuple(name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX))
