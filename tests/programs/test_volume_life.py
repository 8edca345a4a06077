"""The life of volumes and snapshots on hosts with fake drivers: made, attached, grown, locked, rotated, deleted.

Long, because a life has many turns and all of them begin alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import SYSTEM
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.project import Project
from controlplane.models.project_key import ProjectKey, VolumeKey, VolumeKeyUse
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_layer import StorageLayer, StorageLayerUse
from controlplane.models.storage_pool import StoragePool
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.project import keys
from controlplane.resources.project import service as projects
from controlplane.resources.snapshot import service as snapshots
from controlplane.resources.snapshot.schemas import SnapshotTake
from controlplane.resources.storage_pool import layers
from controlplane.resources.storage_pool import service as pools
from controlplane.resources.vm import service as vms
from controlplane.resources.volume import queries
from controlplane.resources.volume import service as volumes
from controlplane.resources.volume.errors import VolumeVmFailed
from controlplane.resources.volume.schemas import VolumeAttach, VolumeCreate
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import VmWanted, VolumeWanted
from tests.fakehost import FakeHost
from tests.programs.fleet import Fleet, open_fleet

SIZE = 1 << 22


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await add_host(fleet, "a")
        yield fleet


async def add_host(fleet: Fleet, name: str) -> FakeHost:
    """With its pools learned, as its program does."""
    from controlplane.models.host import Host

    fake = await fleet.add_host(name)
    async with fleet.database.session() as session:
        host = await session.get_one(Host, fake.id)
        await pools.learn(session, host, fake.facts, fleet.world.clock.now())
    return fake


async def create(fleet: Fleet, name: str = "data", **wanted: Any) -> str:
    body = VolumeCreate.model_validate({"name": name, **({} if wanted.get("snapshot") else {"size_bytes": SIZE}), **wanted})
    async with fleet.database.session() as session:
        assert fleet.project
        return (await volumes.create(session, fleet.project.id, SYSTEM, body, most=100)).id


async def change(fleet: Fleet, volume_id: str, action: Callable[[AsyncSession, Volume], Awaitable[object]]) -> None:
    """What the route frame does around an action: lock machine and volume, change, raise the generation."""
    async with fleet.database.session() as session:
        assert fleet.project
        await volumes.lock_machine_of(session, fleet.project.id, volume_id)
        volume = (await session.scalars(select(Volume).where(Volume.id == volume_id).with_for_update(key_share=True))).one()
        await action(session, volume)
        volume.generation += 1


async def attach(fleet: Fleet, volume_id: str, vm_id: str, *, delete_with_vm: bool = False) -> None:
    async with fleet.database.session() as session:
        vm = (await session.scalars(select(Vm).where(Vm.id == vm_id).with_for_update(key_share=True))).one()
        volume = (await session.scalars(select(Volume).where(Volume.id == volume_id).with_for_update(key_share=True))).one()
        await volumes.attach(session, volume, vm, VolumeAttach(vm=vm_id, delete_with_vm=delete_with_vm))
        volume.generation += 1


async def detach(fleet: Fleet, volume_id: str) -> None:
    async with fleet.database.session() as session:
        assert fleet.project
        vm = await volumes.lock_machine_of(session, fleet.project.id, volume_id)
        volume = (await session.scalars(select(Volume).where(Volume.id == volume_id).with_for_update(key_share=True))).one()
        await volumes.detach(session, volume, vm)
        volume.generation += 1


async def row(fleet: Fleet, volume_id: str) -> Volume | None:
    async with fleet.database.session() as session:
        return await session.get(Volume, volume_id)


async def until_settled(fleet: Fleet, volume_id: str) -> Volume:
    async def is_settled() -> bool:
        found = await row(fleet, volume_id)
        return found is not None and found.state == "available" and found.observed_generation == found.generation

    await fleet.until(is_settled, f"{volume_id} settled")
    found = await row(fleet, volume_id)
    assert found
    return found


async def until_gone(fleet: Fleet, model: type[Any], object_id: str) -> None:
    async def is_gone() -> bool:
        async with fleet.database.session() as session:
            return await session.get(model, object_id) is None

    await fleet.until(is_gone, f"{object_id} gone")


async def count(fleet: Fleet, *models: Any) -> int:
    async with fleet.database.session() as session:
        return sum([await session.scalar(select(func.count()).select_from(model)) or 0 for model in models])


async def reserved(fleet: Fleet) -> int:
    async with fleet.database.session() as session:
        return int(await session.scalar(select(func.sum(StoragePool.reserved_bytes))) or 0)


async def test_made_attached_detached_and_destroyed_with_its_key(fleet: Fleet) -> None:
    vm_id, volume_id = await fleet.create_vm(), await create(fleet)
    (fake,) = fleet.hosts.values()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        volume = await until_settled(fleet, volume_id)
        assert (volume.observed_state, volume.is_encrypted, await count(fleet, VolumeKey)) == ("idle", True, 2)
        await attach(fleet, volume_id, vm_id)
        volume = await until_settled(fleet, volume_id)
        document = fake.agent.documents.get("vm", vm_id)
        assert isinstance(document, VmWanted)
        assert [disk.is_boot for disk in document.disks] == [True, False]
        assert document.disks[1].volume_id == volume_id
        await detach(fleet, volume_id)
        volume = await until_settled(fleet, volume_id)
        assert (volume.vm_id, volume.is_detaching) == (None, False)
        await attach(fleet, volume_id, vm_id)
        await until_settled(fleet, volume_id)
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)
        volume = await until_settled(fleet, volume_id)
        assert volume.vm_id is None, "volumes outlive their machine"
        assert await count(fleet, Volume) == 1, "but not its root disk"
        await change(fleet, volume_id, volumes.remove)
        await until_gone(fleet, Volume, volume_id)
    assert await fleet.on_hosts() == []
    assert await count(fleet, VolumeKey, VolumeKeyUse) == 0, "without its key the data is noise"
    assert await reserved(fleet) == 0


async def test_growing_says_when_it_takes_effect(fleet: Fleet) -> None:
    volume_id = await create(fleet)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        await change(fleet, volume_id, lambda session, volume: volumes.grow(session, volume, 2 * SIZE))
        volume = await until_settled(fleet, volume_id)
    assert (volume.observed_size_bytes, volume.takes_effect, await reserved(fleet)) == (2 * SIZE, "now", 2 * SIZE)


async def test_a_snapshot_outlives_its_volume_and_clones_need_its_key(fleet: Fleet) -> None:
    volume_id = await create(fleet)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        async with fleet.database.session() as session:
            volume = await session.get_one(Volume, volume_id)
            snapshot_id = (await snapshots.take(session, volume, SnapshotTake(name="before"), most=10)).id
        await until_taken(fleet, snapshot_id)
        clone_id = await create(fleet, "clone", snapshot="before")
        await until_settled(fleet, clone_id)
        await change(fleet, volume_id, volumes.remove)
        await until_gone(fleet, Volume, volume_id)
        async with fleet.database.session() as session:
            needed = await session.scalars(select(VolumeKeyUse.key_id).where(VolumeKeyUse.subject_id == clone_id))
            assert volume_id in set(needed), "the clone reads what lies under its origin's key"
        await change(fleet, clone_id, volumes.remove)
        await until_gone(fleet, Volume, clone_id)
        async with fleet.database.session() as session:
            snapshot = await session.get_one(Snapshot, snapshot_id)
            await snapshots.remove(session, snapshot)
            snapshot.generation += 1
        await until_gone(fleet, Snapshot, snapshot_id)
    assert await count(fleet, VolumeKey) == 0
    assert await reserved(fleet) == 0
    assert await fleet.on_hosts() == []


async def test_of_two_that_go_at_once_the_later_takes_layer_and_key_away(fleet: Fleet) -> None:
    """Volume and snapshot stand on one layer and need one key: each sees the other still there, unless it waits for it."""
    volume_id = await create(fleet)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        async with fleet.database.session() as session:
            volume = await session.get_one(Volume, volume_id)
            snapshot_id = (await snapshots.take(session, volume, SnapshotTake(name="before"), most=10)).id
        await until_taken(fleet, snapshot_id)

    async def go(subject_id: str, has_left: asyncio.Event, may_end: asyncio.Event) -> None:
        async with fleet.database.session() as session:
            await layers.leave(session, subject_id)
            await keys.forget(session, subject_id)
            has_left.set()
            await may_end.wait()

    first_left, first_may_end, done = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done.set()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(go(volume_id, first_left, first_may_end))
        await first_left.wait()
        group.create_task(go(snapshot_id, asyncio.Event(), done))
        async with fleet.database.session() as session:
            waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            while not await session.scalar(waits):
                await asyncio.sleep(0.01)
        first_may_end.set()
    assert await count(fleet, StorageLayer, StorageLayerUse, VolumeKey, VolumeKeyUse) == 0
    assert await reserved(fleet) == 0


async def test_keys_are_rotated_and_the_old_one_is_gone(fleet: Fleet) -> None:
    volume_id = await create(fleet)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        async with fleet.database.session() as session:
            before = (await session.scalars(select(ProjectKey.id))).one()
            wrapped = (await session.scalars(select(VolumeKey.wrapped))).one()
            assert fleet.project
            await projects.rotate_key(session, fleet.world.sealer, await session.get_one(Project, fleet.project.id))
        await until_settled(fleet, volume_id)
    async with fleet.database.session() as session:
        key = (await session.scalars(select(VolumeKey))).one()
        assert (await session.scalars(select(ProjectKey.id))).one() == key.project_key_id != before
        assert key.wrapped != wrapped
    (fake,) = fleet.hosts.values()
    document = fake.agent.documents.get("volume", volume_id)
    assert isinstance(document, VolumeWanted)
    assert document.encryption.kek is not None
    assert document.encryption.kek.id == key.project_key_id


async def test_what_is_retained_comes_back_or_goes_when_its_time_is_over(fleet: Fleet) -> None:
    volume_id = await create(fleet, retention_hours=1)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        await change(fleet, volume_id, volumes.remove)
        assert (await row(fleet, volume_id)).state == "retained"  # type: ignore[union-attr]
        await change(fleet, volume_id, volumes.restore)
        await until_settled(fleet, volume_id)
        await change(fleet, volume_id, volumes.remove)
        async with fleet.database.session() as session:
            await session.execute(update(Volume).where(Volume.id == volume_id).values(purge_at=func.now()))
        await fleet.tell("volume", volume_id)
        await until_gone(fleet, Volume, volume_id)
    assert await fleet.on_hosts() == []


async def test_what_leaves_with_its_machine_is_retained_as_it_says(fleet: Fleet) -> None:
    vm_id, kept_id, gone_id = (
        await fleet.create_vm(),
        await create(fleet, "kept", retention_hours=1),
        await create(fleet, "gone"),
    )
    async with fleet.running():
        await fleet.until_ready(vm_id)
        for volume_id in (kept_id, gone_id):
            await until_settled(fleet, volume_id)
            await attach(fleet, volume_id, vm_id, delete_with_vm=True)
            await until_settled(fleet, volume_id)
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)
        await until_gone(fleet, Volume, gone_id)
        kept = await row(fleet, kept_id)
        assert kept
        assert (kept.state, kept.vm_id, kept.delete_with_vm) == ("retained", None, False)
        assert kept.purge_at
        await change(fleet, kept_id, volumes.restore)
        await until_settled(fleet, kept_id)


async def test_a_machine_that_fails_fails_the_attachment_and_letting_go_cures_it(fleet: Fleet) -> None:
    vm_id, volume_id, other_id = await fleet.create_vm(), await create(fleet), await create(fleet, "other")
    (fake,) = fleet.hosts.values()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        await until_settled(fleet, volume_id)
        await until_settled(fleet, other_id)
        fake.faults.fail("machine.apply", AgentError("vm.broken", "it does not start with this", retryable=False))
        await attach(fleet, volume_id, vm_id)
        await fleet.change(vm_id, vms.restart)

        async def is_parked() -> bool:
            return (await fleet.run_of("volume", volume_id)).parked_code == "volume.vm_failed"

        await fleet.until(is_parked, "the attachment has failed")
        assert "vm.broken" in str((await fleet.run_of("volume", volume_id)).parked_detail)
        with pytest.raises(VolumeVmFailed):
            await attach(fleet, other_id, vm_id)
        await detach(fleet, volume_id)
        volume = await until_settled(fleet, volume_id)
        assert volume.vm_id is None
        await fleet.until_ready(vm_id)
        await attach(fleet, other_id, vm_id)
        await until_settled(fleet, other_id)


async def test_a_disk_is_free_when_its_machine_has_let_it_go(fleet: Fleet) -> None:
    """Its guest keeps it, so it holds it until it is stopped."""
    volume_id = await create(fleet)
    (fake,) = fleet.hosts.values()
    vm_id = await fleet.create_vm(volumes=[{"name": "own", "size_bytes": SIZE}])
    async with fleet.running():
        await fleet.until_ready(vm_id)
        async with fleet.database.session() as session:
            own_id = await session.scalar(select(Volume.id).where(Volume.name == "own"))
        assert own_id
        await until_settled(fleet, volume_id)
        fake.machine.kept.add(own_id)
        await detach(fleet, own_id)

        async def is_pending() -> bool:
            async with fleet.database.session() as session:
                shown = await queries.show(session, await session.get_one(Volume, own_id))
                return [(said.type, said.reason) for said in shown.conditions if said.type == "DetachPending"] == [
                    ("DetachPending", "in_use_by_guest")
                ]

        await fleet.until(is_pending, "it says what it waits for")
        held = await row(fleet, own_id)
        assert held
        assert (held.vm_id, held.is_detaching) == (vm_id, True), "another machine must not get it meanwhile"
        await fleet.change(vm_id, vms.restart)
        assert (await until_settled(fleet, own_id)).vm_id is None


async def test_a_guest_that_keeps_a_disk_is_named(fleet: Fleet) -> None:
    vm_id, volume_id = await fleet.create_vm(), await create(fleet)
    (fake,) = fleet.hosts.values()
    async with fleet.running():
        await fleet.until_ready(vm_id)
        await until_settled(fleet, volume_id)
        await attach(fleet, volume_id, vm_id)
        await until_settled(fleet, volume_id)
        await fleet.change(vm_id, vms.restart)
        await fleet.until_ready(vm_id)
        fake.faults.fail("machine.observe", AgentError("vm.detach_waits", "it keeps it", volumes=[volume_id]), times=2)
        await detach(fleet, volume_id)

        async def is_named() -> bool:
            async with fleet.database.session() as session:
                shown = await queries.show(session, await session.get_one(Volume, volume_id))
                return "in_use_by_guest" in [said.reason for said in shown.conditions]

        await fleet.until(is_named, "it says who keeps it")


async def test_a_snapshot_says_the_size_that_was_taken(fleet: Fleet) -> None:
    """A growth that was asked for just before is not carried out yet when the snapshot is taken."""
    volume_id = await create(fleet)
    async with fleet.running():
        await until_settled(fleet, volume_id)
        (fake,) = fleet.hosts.values()
        held = fake.faults.hold("storage.apply")
        await change(fleet, volume_id, lambda session, volume: volumes.grow(session, volume, 2 * SIZE))
        async with fleet.database.session() as session:
            volume = await session.get_one(Volume, volume_id)
            snapshot_id = (await snapshots.take(session, volume, SnapshotTake(name="before"), most=10)).id
        taken = await until_taken(fleet, snapshot_id)
        held.set()
        await until_settled(fleet, volume_id)
        assert taken.size_bytes == SIZE
        clone = await until_settled(fleet, await create(fleet, "clone", snapshot="before"))
        assert clone.size_bytes == SIZE


async def until_taken(fleet: Fleet, snapshot_id: str) -> Snapshot:
    async def is_taken() -> bool:
        async with fleet.database.session() as session:
            return (await session.get_one(Snapshot, snapshot_id)).state == "available"

    await fleet.until(is_taken, "snapshot taken")
    async with fleet.database.session() as session:
        return await session.get_one(Snapshot, snapshot_id)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_volume_under_every_fault(fleet: Fleet) -> None:
    async def make(world: World[Any], number: int) -> str:
        del world
        return await create(fleet, f"data-{number}", image="debian")

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        rows = await count(fleet, Volume, VolumeKey, VolumeKeyUse, StorageLayer, StorageLayerUse)
        left = [f"{rows} rows"] if rows else []
        return left + await fleet.on_hosts() + ([f"{held} bytes reserved"] if (held := await reserved(fleet)) else [])

    scenario = Scenario(registry=fleet.registry, program="volume", make=make, leftovers=leftovers)
    assert await Harness(fleet.world, scenario).run() > 8
