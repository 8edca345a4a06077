"""The life of a volume on its host. Steps stand in the order they happen; `destroy` may follow any of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import func, select

from controlplane.events.service import emit
from controlplane.kernel import epoch
from controlplane.kernel.program import Outcome, Program, Terminal, done, goto, step, wait
from controlplane.kernel.tx import Tx
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.placement.wake import wake_waiting
from controlplane.remote.link import HostKeyChanged, HostLinks, HostUnreachable
from controlplane.remote.refusal import carried_out, refusals_park
from controlplane.resources.image.copies import copy_on
from controlplane.resources.image.program import ImageCopyProgram
from controlplane.resources.project import keys
from controlplane.resources.storage_pool import layers
from controlplane.resources.volume import service
from controlplane.resources.volume.conditions import is_settled
from controlplane.resources.volume.document import volume_document
from hostagent.protocol.results import Running, Succeeded
from hostagent.protocol.verbs import SealedKey, VolumeUnlock
from hostagent.protocol.wanted import Generation, Observed, VolumeWanted

LOOK_SECONDS = 300
SOON_SECONDS = 5
_STATES = ("idle", "exported", "locked", "failed", "absent")


class VolumeProgram(Program[Volume, HostLinks]):
    """Owns one volume: has it made, opened, changed, and at last destroyed with its key."""

    @step(within=timedelta(minutes=30))
    async def place(self) -> Outcome:
        """Go to its host. One that waits with its machine is told when that has a host."""
        async with self.tx() as tx:
            volume = await self._locked(tx)
            if volume.host_id is None:
                return tx.wait()
            self.move_to(volume.host_id)
            if volume.image_id is not None:
                copy_id = await copy_on(tx.session, image_id=volume.image_id, host_id=volume.host_id)
                self.spawn(ImageCopyProgram, copy_id, host_id=volume.host_id)
            return tx.goto(self.fetch)

    @step(within=timedelta(hours=1))
    async def fetch(self) -> Outcome:
        """Wait until the image that it begins as lies whole on the host."""
        if not await self.children_ready():
            return wait()
        return goto(self.apply)

    @step(within=timedelta(minutes=10))
    async def apply(self) -> Outcome:
        """Tell the host what is wanted now, open it where only the control plane can, and keep what it says of keys."""
        host_id = self.subject.host_id
        assert host_id is not None
        document = await self._document()
        with refusals_park():
            result = await self.world.hosts.ensure(host_id, document)
            if isinstance(result, Running) and result.step == "locked":
                await self._say_locked()
                await self._unlock(result.needs)
                return wait(seconds=1)
            success = carried_out(result)
        if success is None:
            return wait(seconds=2)
        async with self.tx() as tx:
            await self._learn(tx, success)
            return tx.goto(self.serve)

    @step(within=None)
    async def serve(self) -> Outcome:
        """At rest: carry out changes, open it after a reboot, write down what is seen, end when its time is over."""
        volume = self.subject
        if volume.state == "deleting" or volume.host_id is None:
            return wait()
        if volume.state == "retained" and await self._is_over():
            return goto(self.destroy)
        try:
            seen = await self.world.hosts.observe(volume.host_id, "volume", volume.id)
        except (HostUnreachable, HostKeyChanged):
            return wait(seconds=LOOK_SECONDS)  # the host's own state tells; its return is a signal
        if seen is None or seen.generation != await self._generation() or seen.state == "locked" or self._is_to_be_asked():
            return goto(self.apply)
        is_restacked = seen.detail.get("layers") != volume.observed_detail.get("layers")
        async with self.tx() as tx:
            is_done = await self._note(tx, seen)
            if is_restacked:
                return tx.goto(self.apply)
            return tx.wait(seconds=LOOK_SECONDS if is_done else SOON_SECONDS)

    @step(within=timedelta(minutes=30))
    async def destroy(self) -> Outcome:
        """Remove it from the host, then destroy its key, give back its room and delete the row."""
        if not self.has_subject:
            return done()
        host_id = self.subject.host_id
        if host_id is not None and not await self._is_host_forgotten(host_id):
            generation = await self._generation()
            with refusals_park():
                if carried_out(await self.world.hosts.purge(host_id, "volume", self.subject_id, generation)) is None:
                    return wait(seconds=2)
        async with self.tx() as tx:
            volume = await self._locked(tx)
            await keys.forget(tx.session, volume.id)
            await layers.leave(tx.session, volume.id)
            await emit(
                tx.session, "volume.deleted", "volume", volume.id, project_id=volume.project_id, body={"name": volume.name}
            )
            if volume.vm_id is not None:
                self.signal("vm", volume.vm_id, "volume")
            await tx.session.delete(volume)
            await tx.session.flush()
            await wake_waiting(tx.session)
            return tx.done()

    # -- rows ---------------------------------------------------------------------------------------------------------

    async def _locked(self, tx: Tx) -> Volume:
        query = select(Volume).where(Volume.id == self.subject_id).with_for_update(key_share=True)
        return (await tx.session.scalars(query)).one()

    async def _generation(self) -> Generation:
        async with self.tx() as tx:
            return Generation(epoch=await epoch.current(tx.session), number=self.subject.generation)

    async def _document(self) -> VolumeWanted:
        async with self.tx() as tx:
            volume = await tx.session.get_one(Volume, self.subject_id)
            image = await tx.session.get_one(Image, volume.image_id) if volume.image_id else None
            key = await keys.ensure_key(tx.session, self.world.sealer, volume.project_id)
            return volume_document(volume, image, key, epoch=await epoch.current(tx.session))

    async def _is_over(self) -> bool:
        """Whether what is retained has been kept long enough; from then on it is not restored any more."""
        async with self.tx() as tx:
            volume = await self._locked(tx)
            is_over = volume.purge_at is not None and volume.purge_at <= self.world.clock.now()
            if is_over:
                volume.state, volume.purge_at, volume.is_protected = "deleting", None, False
            return is_over

    async def _is_host_forgotten(self, host_id: str) -> bool:
        async with self.tx() as tx:
            return bool(await tx.session.scalar(select(Host.is_forgotten).where(Host.id == host_id)))

    def _is_to_be_asked(self) -> bool:
        """Its machine has just done something: it may see a growth now, or have let the volume go. Or a snapshot has gone."""
        return (self.subject.takes_effect == "after_reboot" and self.has_signal("vm")) or self.has_signal("snapshot")

    async def _learn(self, tx: Tx, success: Succeeded) -> None:
        observed: dict[str, Any] = success.observed
        volume = await self._locked(tx)
        if volume.state == "creating":
            volume.state, volume.ready_at = "available", func.now()
        volume.observed_state = _state(observed.get("state"))
        volume.observed_at = func.now()
        volume.observed_size_bytes = int(observed.get("size_bytes") or 0)
        volume.takes_effect = observed.get("takes_effect") or volume.takes_effect
        if "encrypted" in observed:
            volume.is_encrypted = bool(observed["encrypted"])
        if volume.host_id is not None:
            await layers.learn(tx.session, volume.id, volume.host_id, volume.pool, observed.get("layers") or ())
        await keys.record(tx.session, volume.id, volume.snapshot_id, observed.get("keys") or ())

    async def _note(self, tx: Tx, seen: Observed) -> bool:
        """Write down what is seen; whether the volume, and the machine that has it, are as wanted."""
        vm_id = await tx.session.scalar(select(Volume.vm_id).where(Volume.id == self.subject_id))
        vm = await tx.session.get(Vm, vm_id) if vm_id else None
        volume = await self._locked(tx)
        state = _state(seen.state)
        if state != volume.observed_state:
            await self._tell_state(tx, volume, state)
        volume.observed_state, volume.observed_at, volume.observed_detail = state, func.now(), dict(seen.detail)
        size = seen.detail.get("size_bytes")
        volume.observed_size_bytes = size if isinstance(size, int) else volume.observed_size_bytes
        if volume.generation != self.subject.generation:
            return False
        before, volume.observed_generation = volume.observed_generation, volume.generation
        if is_settled(volume, vm):
            return True
        volume.observed_generation = before
        parked = await service.parked_machine(tx.session, vm.id) if vm is not None else None
        if parked is not None and vm is not None:
            words = f"{vm.name}, which has it, has failed: {parked.parked_code}: {parked.parked_detail}"
            raise Terminal(service.VM_FAILED, words)
        return False

    async def _say_locked(self) -> None:
        """Before anything is tried: who looks sees what it waits for, also when no key can be sent."""
        async with self.tx() as tx:
            volume = await self._locked(tx)
            if volume.observed_state != "locked":
                await self._tell_state(tx, volume, "locked")
            volume.observed_state, volume.observed_at = "locked", func.now()

    async def _tell_state(self, tx: Tx, volume: Volume, state: str) -> None:
        body = {"name": volume.name, "before": volume.observed_state}
        await emit(tx.session, f"volume.{state}", "volume", volume.id, project_id=volume.project_id, body={**body})

    async def _unlock(self, key_ids: Sequence[str]) -> None:
        """Send the host the keys that it asks for. Raises Terminal where there are none: then nobody can open it."""
        assert self.subject.host_id is not None
        async with self.tx() as tx:
            host = await tx.session.get_one(Host, self.subject.host_id)
            public_key = str((host.facts or {}).get("storage_public_key") or "")
            if not public_key:
                raise Terminal(
                    "volume.host_key_unknown", f"host {host.name} has not said to which key volumes' keys are sealed"
                )
            volume = await tx.session.get_one(Volume, self.subject_id)
            foreign = sorted(set(key_ids) - await keys.needed_by(tx.session, volume.id, volume.snapshot_id))
            if foreign:
                raise Terminal("volume.key_foreign", f"host {host.name} asks for keys that are not its: {', '.join(foreign)}")
            sealed, unknown = await keys.sealed_to(tx.session, self.world.sealer, key_ids, public_key)
        if unknown:
            raise Terminal(
                "volume.key_missing", f"nothing is known of the keys {', '.join(unknown)}: the data cannot be opened"
            )
        body = VolumeUnlock(id=self.subject_id, keys=tuple(SealedKey(id=key_id, sealed=text) for key_id, text in sealed))
        await self.world.hosts.call(self.subject.host_id, "volume.unlock", body)
        if self.subject.vm_id is not None:
            self.signal("vm", self.subject.vm_id, "volume")


def _state(text: object) -> str:
    return str(text) if text in _STATES else "failed"
