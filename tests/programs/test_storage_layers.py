"""What pools promise is what lies on the host, whatever was made, snapshotted, cloned, grown and deleted in which order."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import func, select

from controlplane.authz.service import SYSTEM
from controlplane.core.errors import BedplateError
from controlplane.models.host import Host
from controlplane.models.snapshot import Snapshot
from controlplane.models.storage_layer import StorageLayer, StorageLayerUse
from controlplane.models.storage_pool import StoragePool
from controlplane.models.volume import Volume
from controlplane.resources.snapshot import service as snapshots
from controlplane.resources.snapshot.schemas import SnapshotTake
from controlplane.resources.storage_pool import service as pools
from controlplane.resources.volume import service as volumes
from controlplane.resources.volume.schemas import VolumeCreate
from hostagent.drivers.storage import layers
from hostagent.drivers.storage.qsd import QsdStorage
from hostagent.drivers.storage.qsd_data import qcow2_size
from hostagent.lib.paths import Paths
from tests.conformance.conftest import Daemon
from tests.programs.fleet import Fleet, open_fleet

pytestmark = pytest.mark.caps("qsd", "root")
MIB = 1 << 20
SIZES = (1 * MIB, 2 * MIB, 8 * MIB)


@pytest.fixture
async def fleet(database_url: str) -> AsyncIterator[Fleet]:
    """One host whose volumes are real ones."""
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    root.chmod(0o755)  # programs of other users read in it, as in the normal paths
    try:
        async with open_fleet(database_url, root) as fleet:
            fake = await fleet.add_host("a")
            daemon = Daemon(fake.agent.paths)
            fake.agent.paths.run.mkdir(parents=True, exist_ok=True)
            await daemon.start()
            fake.agent.drivers.storages["qsd"] = QsdStorage(daemon.driver, fake.agent.paths)
            async with fleet.database.session() as session:
                host = await session.get_one(Host, fake.id)
                host.facts = {**(host.facts or {}), "storage_drivers": ["qsd"]}
                await pools.learn(session, host, fake.facts, fleet.world.clock.now())
            yield fleet
            await daemon.stop()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def on_disk(paths: Paths) -> int:
    """Every file once: what is written may grow to its size, what is closed stays as large as it is."""
    written, closed = {}, {}
    for directory in (*(paths.state / "volume").glob("*"), *(paths.state / "snapshot").glob("*")):
        found = layers.read(directory)
        for layer in found.layers if found else ():
            file = directory / layer.file
            if layer.snapshot_id:
                closed[file.stat().st_ino] = file.stat().st_blocks * 512
            else:
                written[file.stat().st_ino] = qcow2_size(file)
    assert not written.keys() & closed.keys()
    return sum(written.values()) + sum(closed.values())


async def reserved(fleet: Fleet) -> int:
    async with fleet.database.session() as session:
        return int(await session.scalar(select(func.sum(StoragePool.reserved_bytes))) or 0)


async def change(fleet: Fleet, chosen: random.Random, number: int) -> None:
    """One thing that a tenant may ask for, done to what is there; what is refused is refused."""
    action = chosen.choice(("create", "create", "snapshot", "snapshot", "clone", "grow", "delete", "delete", "forget"))
    async with fleet.database.session() as session:
        assert fleet.project
        mine = list(await session.scalars(select(Volume).order_by(Volume.name).with_for_update(key_share=True)))
        taken = list(await session.scalars(select(Snapshot).order_by(Snapshot.name).with_for_update(key_share=True)))
        volume = chosen.choice(mine) if mine else None
        snapshot = chosen.choice(taken) if taken else None
        if action == "create" or (action == "clone" and snapshot is not None):
            size = {"snapshot": snapshot.name} if action == "clone" and snapshot else {"size_bytes": chosen.choice(SIZES)}
            await volumes.create(
                session, fleet.project.id, SYSTEM, VolumeCreate.model_validate({"name": f"v{number}", **size}), most=100
            )
        elif action == "snapshot" and volume is not None:
            await snapshots.take(session, volume, SnapshotTake(name=f"s{number}"), most=100)
        elif action == "grow" and volume is not None:
            await volumes.grow(session, volume, volume.size_bytes + MIB)
            volume.generation += 1
        elif action == "delete" and volume is not None:
            await volumes.remove(session, volume)
            volume.generation += 1
        elif action == "forget" and snapshot is not None:
            await snapshots.remove(session, snapshot)
            snapshot.generation += 1


async def until_quiet(fleet: Fleet) -> None:
    async def is_quiet() -> bool:
        async with fleet.database.session() as session:
            waiting = select(func.count()).select_from(Volume)
            waiting = waiting.where((Volume.state != "available") | (Volume.observed_generation < Volume.generation))
            taking = select(func.count()).select_from(Snapshot).where(Snapshot.state != "available")
            return not (await session.scalar(waiting) or await session.scalar(taking))

    await fleet.until(is_quiet, "all volumes and snapshots at rest", 60)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [1, 2])
async def test_the_counters_are_what_lies_on_the_host(fleet: Fleet, seed: int) -> None:
    chosen = random.Random(seed)
    (fake,) = fleet.hosts.values()
    done = 0
    async with fleet.running():
        for number in range(30):
            try:
                await change(fleet, chosen, number)
                done += 1
            except BedplateError:
                continue
            if chosen.random() < 0.4:
                await until_quiet(fleet)
                await fleet.until(lambda: agrees(fleet, fake.agent.paths), "counters and disk agree", 20)
        assert done > 15
        await until_quiet(fleet)
        await fleet.until(lambda: agrees(fleet, fake.agent.paths), "counters and disk agree", 20)
        await remove_all(fleet)
    assert (await reserved(fleet), on_disk(fake.agent.paths)) == (0, 0)


async def agrees(fleet: Fleet, paths: Paths) -> bool:
    """Of one moment: no layer is there for nobody, and the pool promises what all layers hold; and that is what lies there."""
    promised = select(func.sum(StoragePool.reserved_bytes)).scalar_subquery()
    held = select(func.coalesce(func.sum(StorageLayer.bytes), 0)).scalar_subquery()
    unused = select(func.count()).where(StorageLayer.id.not_in(select(StorageLayerUse.layer_id))).scalar_subquery()
    async with fleet.database.session() as session:
        found = (await session.execute(select(promised, held, unused))).one()
    assert (found[0], found[2]) == (found[1], 0)
    return found[0] == on_disk(paths)


async def remove_all(fleet: Fleet) -> None:
    """Clones before their snapshots, until nothing is left."""

    async def is_empty() -> bool:
        async with fleet.database.session() as session:
            for volume in await session.scalars(select(Volume).order_by(Volume.id).with_for_update(key_share=True)):
                await volumes.remove(session, volume)
            clones = select(Volume.snapshot_id).where(Volume.snapshot_id.is_not(None))
            free = select(Snapshot).where(Snapshot.id.not_in(clones)).order_by(Snapshot.id)
            left = list(await session.scalars(free.with_for_update(key_share=True)))
            for snapshot in left:
                await snapshots.remove(session, snapshot)
            return not left and not await session.scalar(select(func.count()).select_from(Volume))

    await fleet.until(is_empty, "everything gone", 60)
