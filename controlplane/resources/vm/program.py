"""The life of a VM. Steps stand in the order they happen; `destroy` may follow any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select

from controlplane.core.json import Json
from controlplane.events.service import emit
from controlplane.kernel import epoch
from controlplane.kernel import service as kernel
from controlplane.kernel.program import Outcome, Program, done, goto, step, wait
from controlplane.kernel.tx import Tx
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.placement.queue import wake_next
from controlplane.placement.reserve import release, resize_reservation
from controlplane.placement.wake import wake_waiting
from controlplane.remote.link import AgentError, HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out, refusals_park
from controlplane.resources.image.copies import copy_on
from controlplane.resources.image.program import ImageCopyProgram
from controlplane.resources.loadbalancer import service as loadbalancers
from controlplane.resources.nic.queries import nics_of
from controlplane.resources.nic.service import put_on_host, remove_nics
from controlplane.resources.vm import guards, service
from controlplane.resources.vm.document import images_of, vm_document
from controlplane.resources.vm.request import request_for
from controlplane.resources.volume import service as volumes
from controlplane.resources.volume.conditions import has_disk
from controlplane.resources.volume.program import VolumeProgram
from controlplane.resources.volume.queries import IN_ORDER
from hostagent.protocol.wanted import Generation, VmWanted

LOOK_SECONDS = 300
SOON_SECONDS = 5
LOOK_AT_DISKS_SECONDS = 5
RETRY_PLACE_SECONDS = 15


class VmProgram(Program[Vm, HostLinks]):
    """Owns one VM: places it, prepares its host, boots it, serves signals, removes it."""

    @step(within=timedelta(minutes=30))
    async def place(self) -> Outcome:
        """Reserve on one host, if the request that made us has not; spawn what outlives one call."""
        async with self.tx() as tx:
            vm = await self._locked(tx)
            if vm.host_id is None:
                image = await tx.session.get_one(Image, vm.image_id)
                if await service.place(tx.session, vm, image.architecture) is None:
                    return tx.wait(seconds=RETRY_PLACE_SECONDS)
                await wake_next(tx.session)
            assert vm.host_id is not None
            await put_on_host(tx.session, vm.id, vm.host_id)
            await loadbalancers.machine_changed(tx.session, vm.id)
            await kernel.start(tx.session, "routes", "all")
            self.move_to(vm.host_id)
            for image_id in images_of(vm):
                copy_id = await copy_on(tx.session, image_id=image_id, host_id=vm.host_id)
                self.spawn(ImageCopyProgram, copy_id, host_id=vm.host_id)
            return tx.goto(self.fetch)

    @step(within=timedelta(hours=1))
    async def fetch(self) -> Outcome:
        """Wait until the images lie whole on the host; a copy's own run uploads it, once for all VMs there."""
        if not await self.children_ready():
            return wait()
        async with self.tx() as tx:
            for volume in await self._volumes(tx):
                self.spawn(VolumeProgram, volume.id, host_id=volume.host_id)
            return tx.goto(self.prepare)

    @step(within=timedelta(minutes=30))
    async def prepare(self) -> Outcome:
        """Wait until its disks are made; each has a run of its own. A container has none."""
        if not await self.children_ready():
            return wait()
        return goto(self.secure)

    @step(within=timedelta(minutes=10))
    async def secure(self) -> Outcome:
        """Wait until the host has the policy and the firewalls of this machine: it never runs a moment without them."""
        host_id = self.subject.host_id
        assert host_id is not None
        async with self.tx() as tx:
            missing = await guards.missing(tx.session, self.world.settings.network, self.subject_id, host_id)
            if not missing:
                return tx.goto(self.apply)
            refused = await guards.refusal(tx.session, host_id, missing)
        if refused is not None:
            raise refused
        return wait(seconds=2)

    @step(within=timedelta(minutes=10))
    async def apply(self) -> Outcome:
        """Tell the host what is wanted now, and wait until it is so."""
        assert self.subject.host_id is not None
        document = await self._document()
        try:
            with refusals_park():
                success = carried_out(await self.world.hosts.ensure(self.subject.host_id, document))
        except AgentError as error:
            if error.code != "vm.detach_waits":
                raise
            return await self._wait_for_guest(error.context.get("volumes") or ())
        if success is None:
            return wait(seconds=2)
        state = str(success.observed.get("state", "unknown"))
        async with self.tx() as tx:
            vm = await self._locked(tx)
            await self._note(tx, vm, state, {"held": bool(success.observed.get("held"))})
            vm.observed_generation = max(vm.observed_generation, document.generation.number)
            await self._settle_share(tx, vm)
            await self._tell_disks(tx)
            return tx.goto(self.serve)

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: carry out changes, look at the host when told and now and then, write down what is seen."""
        vm = self.subject
        assert vm.host_id is not None
        if vm.generation > vm.observed_generation:
            return goto(self.apply)
        try:
            seen = await self.world.hosts.observe(vm.host_id, "vm", vm.id)
        except (HostUnreachable, HostKeyChanged):
            return wait(seconds=LOOK_SECONDS)  # the host's own state tells; its return is a signal
        if seen is None or seen.generation != await self._generation():
            return goto(self.apply)
        state = "stopped" if seen.state == "absent" else seen.state  # the document is there, no process is
        async with self.tx() as tx:
            await self._note(tx, await self._locked(tx), state, dict(seen.detail))
            has_let_go = await self._let_go_disks(tx, state, seen.detail)
        is_as_wanted = (state == vm.power or bool(seen.detail.get("held"))) and has_let_go
        return wait(seconds=LOOK_SECONDS if is_as_wanted else SOON_SECONDS)

    @step(within=timedelta(minutes=30))
    async def destroy(self) -> Outcome:
        """Remove machine, then its disks, from the host; then give back addresses and share, and tell who waits for room."""
        if not self.has_subject:
            return done()
        host_id = self.subject.host_id
        if host_id is not None and not await self._is_host_forgotten(host_id):
            generation = await self._generation()
            with refusals_park():
                gone = carried_out(await self.world.hosts.purge(host_id, "vm", self.subject_id, generation))
            if gone is None:
                return wait(seconds=2)
        if not await self._disks_gone():
            return wait(seconds=LOOK_AT_DISKS_SECONDS)
        async with self.tx() as tx:
            vm = await self._locked(tx)
            await loadbalancers.machine_changed(tx.session, vm.id)
            await remove_nics(tx.session, vm.id)
            await release(tx.session, vm.id)
            await emit(tx.session, "vm.deleted", "vm", vm.id, project_id=vm.project_id, body={"name": vm.name})
            await tx.session.delete(vm)
            await tx.session.flush()
            await kernel.start(tx.session, "routes", "all")
            await wake_waiting(tx.session)
            return tx.done()

    # -- rows ---------------------------------------------------------------------------------------------------------

    async def _locked(self, tx: Tx) -> Vm:
        query = select(Vm).where(Vm.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    async def _volumes(self, tx: Tx) -> list[Volume]:
        """Its disks in their order, also those that are just being taken out."""
        return list(await tx.session.scalars(select(Volume).where(Volume.vm_id == self.subject_id).order_by(*IN_ORDER)))

    async def _tell_disks(self, tx: Tx) -> None:
        """The host has carried out a change: its disks look what that means for them."""
        for volume in await self._volumes(tx):
            if await volumes.waits_for_machine(tx.session, volume.id):
                await kernel.resume(tx.session, volumes.PROGRAM, volume.id)
            self.signal(VolumeProgram, volume.id, "vm")

    async def _let_go_disks(self, tx: Tx, state: str, detail: Mapping[str, Any]) -> bool:
        """Disks that were taken out are free as soon as no process has them; False: one is still held."""
        vm, is_free = await self._locked(tx), True
        for volume in await self._volumes(tx):
            if not volume.is_detaching or vm.generation != self.subject.generation:
                continue
            if has_disk(volume.id, state, detail):
                is_free = False
                continue
            volume.vm_id, volume.attached_at, volume.is_detaching, volume.delete_with_vm = None, None, False, False
            self.signal(VolumeProgram, volume.id, "vm")
        return is_free

    async def _wait_for_guest(self, volume_ids: Iterable[str]) -> Outcome:
        """It keeps disks that it was asked to let go: who looks at them sees that."""
        async with self.tx() as tx:
            vm = await self._locked(tx)
            vm.observed_detail = {**vm.observed_detail, "detaching": ",".join(volume_ids)}
        return wait(seconds=SOON_SECONDS)

    async def _disks_gone(self) -> bool:
        """Those that leave with the machine are on their way; the others are free from now on."""
        async with self.tx() as tx:
            await self._locked(tx)
            leaving = []
            for volume in await self._volumes(tx):
                if volume.delete_with_vm and await volumes.retain(tx.session, volume):
                    self.signal(VolumeProgram, volume.id, "vm")
                elif volume.delete_with_vm:
                    leaving.append(volume.id)
                    volume.state, volume.deleting_at, volume.is_protected = "deleting", func.now(), False
                    self.spawn(VolumeProgram, volume.id, host_id=volume.host_id)
                    self.destroy_child(VolumeProgram, volume.id)
                elif volume.host_id is None:  # the machine never had a host: there is nothing to keep
                    leaving.append(volume.id)
                    volume.state, volume.deleting_at, volume.is_protected = "deleting", func.now(), False
                    self.spawn(VolumeProgram, volume.id)
                    self.destroy_child(VolumeProgram, volume.id)
                else:
                    volume.vm_id, volume.attached_at, volume.is_detaching = None, None, False
                    self.signal(VolumeProgram, volume.id, "vm")
            return not leaving

    async def _document(self) -> VmWanted:
        async with self.tx() as tx:
            vm = await self._locked(tx)
            image = await tx.session.get_one(Image, vm.image_id)
            disks = [volume for volume in await self._volumes(tx) if not volume.is_detaching]
            nics = (await nics_of(tx.session, [vm.id])).get(vm.id, [])
            number = await epoch.current(tx.session)
        user_data = b""
        if vm.user_data_sealed is not None:
            user_data = self.world.sealer.open(vm.user_data_sealed, context=service.seal_context(vm.id))
        return vm_document(vm, image, disks, nics, epoch=number, user_data=user_data.decode())

    async def _generation(self) -> Generation:
        """What the host shall have: after a restore the epoch is another one, and everything is told again."""
        async with self.tx() as tx:
            return Generation(epoch=await epoch.current(tx.session), number=self.subject.generation)

    async def _is_host_forgotten(self, host_id: str) -> bool:
        """Whether the operator gave the host up: then nothing is said to it any more."""
        async with self.tx() as tx:
            return bool(await tx.session.scalar(select(Host.is_forgotten).where(Host.id == host_id)))

    async def _note(self, tx: Tx, vm: Vm, state: str, detail: dict[str, str | int | float | bool | None]) -> None:
        """Write down what was seen; a change of power is an event."""
        power = state if state in ("running", "stopped", "failed", "absent") else "unknown"
        if power != vm.observed_power:
            if power == "running":
                vm.started_at = func.now()
            body = {"name": vm.name, "before": vm.observed_power, "detail": dict(detail)}
            await emit(tx.session, f"vm.{power}", "vm", vm.id, project_id=vm.project_id, body=body)
        if power == vm.observed_power == "running" and detail.get("resets", 0) != vm.observed_detail.get("resets", 0):
            reset: dict[str, Json] = {"name": vm.name, "reason": "the storage daemon of one of its disks died"}
            await emit(tx.session, "vm.reset", "vm", vm.id, project_id=vm.project_id, body=reset)
        vm.observed_power = power
        vm.observed_at = None if power == "unknown" else func.now()
        vm.observed_detail = dict(detail)

    async def _settle_share(self, tx: Tx, vm: Vm) -> None:
        """Hold what the machine has now, or may have at its next start; what a shrink freed goes to who waits."""
        image = await tx.session.get_one(Image, vm.image_id)
        held = request_for(
            vm,
            image.architecture,
            vcpus=max(vm.vcpus, vm.applied_vcpus),
            memory_bytes=max(vm.memory_bytes, vm.applied_memory_bytes),
        )
        await resize_reservation(tx.session, vm.id, held)
        await wake_waiting(tx.session)
