"""Every program of VMs, images and networks, tried by the harness on the real agent with fake drivers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.image import Image, ImageCopy
from controlplane.models.nic import Nic
from controlplane.models.reservation import Reservation
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.image import service as images
from controlplane.resources.image.copies import copy_on
from tests.programs.fleet import Fleet, open_fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        await fleet.add_host("a")
        yield fleet


async def rows_left(fleet: Fleet, *models: Any) -> list[str]:
    async with fleet.database.session() as session:
        counts = [(model.__tablename__, await session.scalar(select(func.count()).select_from(model))) for model in models]
        held = await session.scalar(select(func.sum(Host.reserved_vcpus + Host.reserved_memory_bytes)))
    return [f"{count} rows of {name}" for name, count in counts if count] + ([f"{held} reserved"] if held else [])


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_vm(fleet: Fleet) -> None:
    async def make(world: World[Any], number: int) -> str:
        del world
        return await fleet.create_vm(f"web-{number}")

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await fleet.on_hosts() + await rows_left(fleet, Vm, Nic, Volume, Reservation)

    scenario = Scenario(
        registry=fleet.registry, program="vm", make=make, leftovers=leftovers, changes=("changed", "vm.exited", "capacity")
    )
    assert await Harness(fleet.world, scenario).run() > 10


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_vm_that_waits_for_room(fleet: Fleet) -> None:
    """Destroyed while it waits, too: nothing was ever reserved."""

    async def make(world: World[Any], number: int) -> str:
        async with world.database.session() as session:
            for host in await session.scalars(select(Host)):
                host.is_cordoned = True
        return await fleet.create_vm(f"web-{number}", on_no_capacity="wait")

    async def nudge(world: World[Any], subject: str, step: str) -> None:
        del subject, step
        async with world.database.session() as session:
            for host in await session.scalars(select(Host)):
                host.is_cordoned = False

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await fleet.on_hosts() + await rows_left(fleet, Vm, Nic, Volume, Reservation)

    scenario = Scenario(registry=fleet.registry, program="vm", make=make, leftovers=leftovers, nudge=nudge)
    assert await Harness(fleet.world, scenario).run(stride=2) > 5


async def new_image(fleet: Fleet, number: int) -> str:
    async with fleet.database.session() as session:
        directory = fleet.root / "image"
        manifest = await images.read_manifest(directory)
        return (await images.create(session, manifest, name=f"image-{number}")).id


async def on_host(fleet: Fleet, kind: str, object_id: str) -> list[str]:
    found = [item for fake in fleet.hosts.values() for item in await fake.leftovers()]
    return [item for item in found if item.startswith(f"{kind} {object_id}")]


async def test_image_copy(fleet: Fleet) -> None:
    image_of: dict[str, str] = {}

    async def make(world: World[Any], number: int) -> str:
        image_id, host_id = await new_image(fleet, number), next(iter(fleet.hosts))
        async with world.database.session() as session:
            copy_id = await copy_on(session, image_id=image_id, host_id=host_id)
            await kernel.start(session, "image_copy", copy_id, host_id=host_id)
        image_of[copy_id] = image_id
        return copy_id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world
        return await on_host(fleet, "image", image_of[subject]) + await rows_left(fleet, ImageCopy)

    scenario = Scenario(registry=fleet.registry, program="image_copy", make=make, leftovers=leftovers, changes=("look",))
    assert await Harness(fleet.world, scenario).run() > 5


async def test_image_deleted_with_its_copy(fleet: Fleet) -> None:
    async def make(world: World[Any], number: int) -> str:
        image_id, host_id = await new_image(fleet, number), next(iter(fleet.hosts))
        async with world.database.session() as session:
            copy_id = await copy_on(session, image_id=image_id, host_id=host_id)
            await kernel.start(session, "image_copy", copy_id, host_id=host_id)
            await images.remove(session, await session.get_one(Image, image_id))
        return image_id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        async with world.database.session() as session:
            row = await session.get(Image, subject)
            unfinished = await session.scalars(
                select(Run.program).where(Run.finished_at.is_(None), Run.program.in_(("image", "image_copy")))
            )
            found = [f"run of {name}" for name in unfinished]
        return found + await on_host(fleet, "image", subject) + await rows_left(fleet, ImageCopy) + (["row"] if row else [])

    scenario = Scenario(registry=fleet.registry, program="image", make=make, leftovers=leftovers, changes=())
    assert await Harness(fleet.world, scenario).run() > 3


@pytest.mark.parametrize("program", ["routes", "host_routes"])
async def test_routes(fleet: Fleet, program: str) -> None:
    async def make(world: World[Any], number: int) -> str:
        del number
        subject = "all" if program == "routes" else next(iter(fleet.hosts))
        async with world.database.session() as session:
            await kernel.start(session, program, subject)
        return subject

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return []

    scenario = Scenario(registry=fleet.registry, program=program, make=make, leftovers=leftovers)
    assert await Harness(fleet.world, scenario).run() > 3
