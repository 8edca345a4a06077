"""Machines: everything a host does so that one runs, stays running, or is gone.

The one rule: a document alone suffices to start its machine; what runs already is left alone until its
`restart_generation` is raised.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

from hostagent.drivers.machine.protocol import (
    DiskAttachment,
    MachineDriver,
    MachineObserved,
    MachinePlan,
    NicAttachment,
)
from hostagent.drivers.machine.seed import render_seed
from hostagent.drivers.network.protocol import interface_name
from hostagent.lib.hostconfig import UIDS_PER_MACHINE
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import FirmwareBoot, KernelBoot, Observed, Purge, VmWanted
from hostagent.verbs import firewall, image, lifecycle, nic, plug, revival, workload
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result
from hostagent.verbs.records import VmRecord

_LIVE_FIELDS = ("generation", "power", "restart_generation", "on_guest_poweroff", "home")


class VmKind:
    name = "vm"

    def check(self, agent: Agent, document: VmWanted) -> None:
        driver = driver_of(agent, document)
        boot = document.boot.kind if document.boot else "none"
        if boot not in driver.traits.boots:
            raise AgentError("vm.unsupported", f"{driver.traits.name} does not boot by {boot}", retryable=False)
        if document.vcpus <= 0 or document.memory_bytes <= 0:
            raise AgentError("vm.invalid", "a machine has CPUs and memory", retryable=False)
        workload.check(document.workload, driver.traits)

    async def apply(self, agent: Agent, document: VmWanted, job: Job) -> Result:
        driver = driver_of(agent, document)
        seen = await driver.observe(document.id)
        record = agent.records.adopted(document.id, document.restart_generation)
        if document.power == "stopped":
            return await self._stop(agent, driver, document, seen, job)
        if is_held(document, record, seen):
            agent.records.put(document.id, dataclasses.replace(record, held=document.generation))
            return Succeeded(observed={"state": "stopped", "held": True})
        if seen is not None and seen.state == "running":
            if document.restart_generation > record.restarted:
                job.step = "restart"
                await _leave(agent, document)
                await driver.apply(_stopped(await plan_of(agent, document, job)))
            elif not record.is_starting:
                agent.records.put(document.id, dataclasses.replace(record, started=document.generation))
                await _mend_links(agent, document)
                await plug.settle(agent, driver, document, job)
                await revival.revive(agent, driver, document)
                return _running(agent, seen)
        return await self._start(agent, driver, document, job)

    async def _start(self, agent: Agent, driver: MachineDriver, document: VmWanted, job: Job) -> Result:
        if document.home == "movable" and not agent.grants.holds(document.id, agent.monotonic()):
            raise AgentError("vm.no_grant", f"{document.id} may move and this host holds no grant for it")
        plan = await plan_of(agent, document, job)
        await _drop_links(agent, document.id, document)
        record = agent.records.get_or_make(document.id)
        record = dataclasses.replace(
            record,
            restarted=document.restart_generation,
            started=document.generation,
            held=None,
            digest=digest_of(document),
            disks=tuple(disk.volume_id for disk in document.disks),
            reset_due=(),
            starts=record.starts + 1,
            is_starting=True,
            accelerator=_accelerator(driver, plan),
            nics=tuple(nic.id for nic in document.nics),
        )
        agent.records.put(document.id, record)
        job.step = "start"
        seen = await driver.apply(plan)
        agent.records.put(document.id, dataclasses.replace(record, is_starting=False))
        return _running(agent, seen)

    async def fence(self, agent: Agent, document: VmWanted) -> None:
        """End it at once: it may be started elsewhere from now on."""
        await driver_of(agent, document).remove(document.id)

    async def _stop(
        self, agent: Agent, driver: MachineDriver, document: VmWanted, seen: MachineObserved | None, job: Job
    ) -> Result:
        if seen is not None and seen.state == "running":
            job.step = "stop"
            await _leave(agent, document)
            await driver.apply(_plan_to_stop(agent, document))
        await _drop_links(agent, document.id, document)
        record = agent.records.get_or_make(document.id)
        stopped = dataclasses.replace(record, restarted=document.restart_generation, held=None, is_starting=False)
        agent.records.put(document.id, stopped)
        return Succeeded(observed={"state": "stopped"})

    async def remove(self, agent: Agent, object_id: str, document: VmWanted | None) -> None:
        if document is not None:
            await _leave(agent, document)
        for driver in agent.drivers.machines.values():
            if (document is not None and document.driver == driver.traits.name) or object_id in await driver.vm_ids():
                await driver.remove(object_id)
        await _drop_links(agent, object_id, document, is_gone=True)
        agent.paths.vm_log(object_id).unlink(missing_ok=True)
        shutil.rmtree(agent.paths.vm_run_directory(object_id), ignore_errors=True)
        agent.records.drop(object_id)
        shutil.rmtree(agent.paths.vm_directory(object_id), ignore_errors=True)

    async def observe(self, agent: Agent, object_id: str, document: VmWanted | None) -> Observed | None:
        if document is None:
            return await _observe_unknown(agent, object_id)
        seen = await driver_of(agent, document).observe(object_id)
        record = agent.records.get(object_id)
        if seen is not None and seen.incarnation is not None:
            agent.watch(("vm", object_id), seen.incarnation)
        state = seen.state if seen else "absent"
        detail = _detail(agent, document, record, seen)
        if state == "running":
            detail |= await _link_faults(agent, document)
        return Observed(id=object_id, kind="vm", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: VmWanted, observed: Observed | None) -> bool:
        state = observed.state if observed else "absent"
        detail = observed.detail if observed else {}
        if document.power == "stopped":
            return state != "running"
        if state != "running":
            return bool(detail.get("held"))
        is_whole = not detail.get("links_incomplete") and not detail.get("starting")
        return (
            detail.get("restarted") == document.restart_generation
            and is_whole
            and not (detail.get("disks_pending") or detail.get("reset_due"))
        )

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return tuple(sorted({name for driver in agent.drivers.machines.values() for name in await driver.vm_ids()}))


KIND = VmKind()


async def ensure(agent: Agent, body: VmWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


def driver_of(agent: Agent, document: VmWanted) -> MachineDriver:
    """Raises AgentError `vm.driver_missing`: never another driver than the document names."""
    driver = agent.drivers.machines.get(document.driver)
    if driver is None:
        raise AgentError("vm.driver_missing", f"this host has no machine driver {document.driver}", retryable=False)
    return driver


def is_held(document: VmWanted, record: VmRecord, seen: MachineObserved | None) -> bool:
    """Whether the guest powered itself off under this very document and is meant to stay off."""
    if document.on_guest_poweroff != "stop" or document.restart_generation > record.restarted:
        return False
    if seen is None or (seen.state == "stopped" and not seen.exit_reason):
        return record.held == document.generation
    return seen.exit_reason == "guest_poweroff" and record.started == document.generation


def is_leaving(agent: Agent, document: VmWanted) -> bool:
    """Whether its process, if it runs, is about to be ended: its load balancers send nobody there any more."""
    record = agent.records.get(document.id)
    is_restarting = record is not None and document.restart_generation > record.restarted
    return document.power == "stopped" or is_restarting or agent.documents.is_purged("vm", document.id)


async def _leave(agent: Agent, document: VmWanted) -> None:
    """New flows go elsewhere before the guest hears that it shall stop, here and on other edges."""
    nics = tuple(nic.id for nic in document.nics)
    agent.notices.leave(nics)
    await agent.balancers.leave(nics)


def digest_of(document: VmWanted, *, has_disks: bool = False) -> str:
    """Of everything that only a new start makes true; which disks it has is told apart but for records from before that."""
    body = {name: value for name, value in codec.encode(document).items() if name not in _LIVE_FIELDS}
    if not has_disks:
        body["disks"] = [disk.volume_id for disk in document.disks if disk.is_boot]
    for wanted in body["nics"]:
        wanted.pop("generation")
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


async def plan_of(agent: Agent, document: VmWanted, job: Job) -> MachinePlan:
    """Everything the driver needs, with volumes exported and links made."""
    driver, uid = driver_of(agent, document), agent.records.uid(document.id)
    run_directory, state_directory = agent.paths.vm_run_directory(document.id), agent.paths.vm_directory(document.id)
    _make_directory(run_directory, uid)
    _make_directory(state_directory, os.geteuid())
    agent.paths.vm_log(document.id).parent.mkdir(parents=True, exist_ok=True)
    for name in _boot_files(document):
        image.file_of(agent, document.image_id, name)
    root, mounts = await workload.attachments(agent, document.workload, driver.traits, job)
    return MachinePlan(
        vm=document,
        disks=await _disks(agent, document, job),
        nics=await _nics(agent, document, job),
        image_directory=image.directory_of(agent, document.image_id) if document.image_id else Path(os.devnull),
        run_directory=run_directory,
        state_directory=state_directory,
        log_path=agent.paths.vm_log(document.id),
        uid=uid,
        gid=uid,
        uid_count=UIDS_PER_MACHINE,
        root=root,
        mounts=mounts,
        seed=render_seed(document.id, document.seed, document.nics),
        is_kvm_usable=driver.traits.isolation != "container" and (await agent.probe_kvm()).usable,
    )


def _boot_files(document: VmWanted) -> tuple[str, ...]:
    """Names that a machine driver opens in the image's directory."""
    match document.boot:
        case KernelBoot(kernel_file=kernel, initramfs_file=initramfs):
            names = (kernel, initramfs)
        case FirmwareBoot(firmware_file=firmware):
            names = (firmware,)
        case None:
            names = ()
    return tuple(name for name in names if name)


async def _disks(agent: Agent, document: VmWanted, job: Job) -> tuple[DiskAttachment, ...]:
    job.step = "disks"
    return tuple([await plug.attachment(agent, disk) for disk in document.disks])


async def _nics(agent: Agent, document: VmWanted, job: Job) -> tuple[NicAttachment, ...]:
    attachments = []
    job.step = "nics"
    await firewall.admit(agent, document.nics)
    for wanted in document.nics:
        plan = nic.plan_of(agent, wanted)
        await agent.drivers.links.apply(plan)
        attachments.append(NicAttachment(nic=wanted, interface=plan.interface, kind=plan.kind, peer=plan.peer))
    return tuple(attachments)


async def _link_faults(agent: Agent, document: VmWanted) -> dict[str, str | int | float | bool | None]:
    """How many links of a running machine lost an address, route or neighbour, and how many are gone altogether."""
    seen = [await agent.drivers.links.observe(nic.plan_of(agent, wanted)) for wanted in document.nics]
    return {
        "links_incomplete": sum(found is not None and not found.is_complete for found in seen),
        "links_missing": sum(found is None for found in seen),
    }


async def _mend_links(agent: Agent, document: VmWanted) -> None:
    """What is left of a link is completed. One that is gone needs a new start of its machine: it is reported, not made."""
    for wanted in document.nics:
        plan = nic.plan_of(agent, wanted)
        found = await agent.drivers.links.observe(plan)
        if found is not None and not found.is_complete:
            await agent.drivers.links.apply(plan)


async def _drop_links(agent: Agent, vm_id: str, document: VmWanted | None, *, is_gone: bool = False) -> None:
    """Remove the links that its process was started with and its document has no more; when it `is_gone`, all."""
    wanted = {nic.id for nic in document.nics} if document else set()
    record = agent.records.get(vm_id)
    made = set(record.nics) if record else set()
    elsewhere = {nic.id for vm in agent.documents.all("vm") if vm.id != vm_id for nic in vm.nics}
    dropped = sorted((made | wanted if is_gone else made - wanted) - elsewhere)
    for nic_id in dropped:
        await agent.drivers.links.remove(interface_name(nic_id))
    if dropped:
        await firewall.dismiss(agent, dropped)


def _plan_to_stop(agent: Agent, document: VmWanted) -> MachinePlan:
    """What a driver needs to end a machine: nothing that could be missing, so a machine whose disk is lost can be stopped."""
    uid = agent.records.uid(document.id)
    return MachinePlan(
        vm=dataclasses.replace(document, power="stopped"),
        disks=(),
        nics=(),
        image_directory=Path(os.devnull),
        run_directory=agent.paths.vm_run_directory(document.id),
        state_directory=agent.paths.vm_directory(document.id),
        log_path=agent.paths.vm_log(document.id),
        uid=uid,
        gid=uid,
        uid_count=UIDS_PER_MACHINE,
        seed=render_seed(document.id, document.seed, document.nics),
    )


def _stopped(plan: MachinePlan) -> MachinePlan:
    return dataclasses.replace(plan, vm=dataclasses.replace(plan.vm, power="stopped"))


def _accelerator(driver: MachineDriver, plan: MachinePlan) -> str:
    if driver.traits.isolation == "container":
        return ""
    return "kvm" if plan.is_kvm_usable else "tcg"


def _running(agent: Agent, seen: MachineObserved) -> Result:
    if seen.incarnation is not None:
        agent.watch(("vm", seen.vm_id), seen.incarnation)
    return Succeeded(observed={"state": seen.state})


def _make_directory(path: Path, uid: int) -> None:
    """Nobody else's. The state directory is the agent's own: what lies there (the record) is read back and believed."""
    path.mkdir(parents=True, exist_ok=True, mode=0o755)
    if os.geteuid() == 0:
        os.chown(path, uid, uid)
    path.chmod(0o700)


def _detail(
    agent: Agent, document: VmWanted, record: VmRecord | None, seen: MachineObserved | None
) -> dict[str, str | int | float | bool | None]:
    is_running = seen is not None and seen.state == "running"
    return {
        "driver": document.driver,
        "accelerator": record.accelerator if record else "",
        "exit_reason": seen.exit_reason if seen else "",
        "exit_detail": seen.exit_detail if seen else "",
        "pid": seen.incarnation.pid if seen and seen.incarnation else None,
        "held": document.power == "running" and not is_running and record is not None and is_held(document, record, seen),
        "restarted": record.restarted if record else 0,
        "starts": record.starts if record else 0,
        "starting": is_running and record is not None and record.is_starting,
        "restart_needed": is_running and record is not None and _needs_restart(agent, document, record),
        "reset_due": ",".join(record.reset_due) if is_running and record is not None else "",
        "resets": record.resets if record else 0,
        "reset_unix_ms": record.reset_unix_ms if record else 0,
        **(plug.detail(agent, document, record) if is_running and record is not None else {}),
    }


def _needs_restart(agent: Agent, document: VmWanted, record: VmRecord) -> bool:
    if record.digest != digest_of(document, has_disks=record.disks is None):
        return True
    return not plug.can(agent, document) and plug.differ(document, record)


async def _observe_unknown(agent: Agent, vm_id: str) -> Observed | None:
    for driver in agent.drivers.machines.values():
        seen = await driver.observe(vm_id)
        if seen is not None:
            detail: dict[str, str | int | float | bool | None] = {"driver": driver.traits.name, "process": seen.state}
            return Observed(id=vm_id, kind="vm", generation=None, state="unknown", detail=detail)
    return None
