"""Images by URL: fetched in parts, over a limit, verified; what the digest does not name is not kept."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from controlplane.core.clock import ManualClock
from controlplane.core.pace import Pace
from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.image import Image
from controlplane.resources.image import queries, service
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.image.store import ImageStore
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.site import Site

MIB = 1 << 20


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        yield fleet


async def make(fleet: Fleet, site: Site, *, wrong: str = "", name: str = "far") -> str:
    """An image of three files that the site has; `wrong`: the one that another digest is given for."""
    site.files = {"root.raw": os.urandom(3 * MIB), "vmlinuz": b"a kernel", "initramfs": b"an initramfs"}
    files = [
        {
            "name": name,
            "sha256": hashlib.sha256(content + (b"!" if name == wrong else b"")).hexdigest(),
            "size_bytes": len(content),
            "url": f"{site.url}/{name}",
        }
        for name, content in site.files.items()
    ]
    boot = {"kind": "kernel", "kernel_file": "vmlinuz", "initramfs_file": "initramfs", "cmdline": "quiet"}
    words = {"name": name, "architecture": "x86_64", "root_file": "root.raw", "min_disk_bytes": 4 * MIB}
    manifest = ImageManifest.model_validate(words | {"boot": boot, "files": files})
    async with fleet.database.session() as session:
        return (await service.create(session, manifest)).id


async def shown(fleet: Fleet, image_id: str) -> queries.ShownImage | None:
    async with fleet.database.session() as session:
        row = await session.get(Image, image_id)
        return None if row is None else await queries.show(session, row)


async def until_available(fleet: Fleet, image_id: str) -> queries.ShownImage:
    async def is_there() -> bool:
        seen = await shown(fleet, image_id)
        return seen is not None and seen.state == "available"

    await fleet.until(is_there, "image available", 30)
    return cast("queries.ShownImage", await shown(fleet, image_id))


@pytest.mark.parametrize("ranges", [True, False])
async def test_a_cut_download_goes_on_and_the_image_is_there(fleet: Fleet, site: Site, ranges: bool) -> None:
    site.cuts, site.ranges = 2, ranges
    image_id = await make(fleet, site)
    async with fleet.running():
        image = await until_available(fleet, image_id)
    assert [(file.is_stored, file.fetched_bytes) for file in image.files] == [(True, file.size_bytes) for file in image.files]
    store = ImageStore(fleet.world.settings.state_dir)
    for file in image.files:
        assert store.path(file.sha256).read_bytes() == site.files[file.name]
    assert [path.name for path in store.directory.iterdir() if path.name.startswith(".")] == []
    assert [asked for asked in site.asked if asked], "what had come was not asked for again"


async def test_another_content_than_was_named_is_refused_and_not_kept(fleet: Fleet, site: Site) -> None:
    image_id = await make(fleet, site, wrong="root.raw")
    async with fleet.running():

        async def has_stopped() -> bool:
            seen = await shown(fleet, image_id)
            return seen is not None and seen.failure is not None

        await fleet.until(has_stopped, "the image is refused")
        image = await shown(fleet, image_id)
        assert image
        assert image.state == "uploading"
        assert "with sha256" in str(image.failure)
        run = await fleet.run_of("image", image_id)
        assert run.parked_code == "image.blob_mismatch"
        site.files["root.raw"] += b"!"  # the size is another one now: still refused
        async with fleet.database.session() as session:
            await kernel.resume(session, "image", image_id)

        async def is_over() -> bool:
            again = await fleet.run_of("image", image_id)
            return again.parked_at is not None and again.parked_at != run.parked_at

        await fleet.until(is_over, "refused again")
        async with fleet.database.session() as session:
            row = await session.get_one(Image, image_id, with_for_update=True)
            await service.remove(session, row)

        async def is_gone() -> bool:
            return await shown(fleet, image_id) is None

        await fleet.until(is_gone, "image gone")
    kept = {path.read_bytes() for path in ImageStore(fleet.world.settings.state_dir).directory.iterdir()}
    assert not kept & set(site.files.values())


async def test_what_is_not_there_is_said(fleet: Fleet, site: Site) -> None:
    image_id = await make(fleet, site)
    del site.files["root.raw"]
    async with fleet.running():

        async def has_stopped() -> bool:
            seen = await shown(fleet, image_id)
            return seen is not None and seen.failure is not None

        await fleet.until(has_stopped, "the image is refused")
    image = await shown(fleet, image_id)
    assert image
    assert f"{site.url}/root.raw answered 404" in str(image.failure)


async def test_a_limit_is_shared_and_holds() -> None:
    clock, slept = ManualClock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    pace = Pace(MIB, clock=clock, sleep=sleep)
    for _ in range(40):
        await pace.spend(MIB // 4)
    assert sum(slept) == pytest.approx(10, abs=0.3)
    clock.advance(3600)
    await pace.spend(MIB // 4)
    await pace.spend(MIB)
    assert sum(slept) == pytest.approx(11, abs=0.3), "an idle hour is not saved up"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_fetching_under_every_fault(fleet: Fleet, site: Site) -> None:
    """It ends whole or is gone, and nothing half-fetched stays."""
    store = ImageStore(fleet.world.settings.state_dir)
    kept = {path.name for path in store.directory.iterdir()}

    async def make_one(world: World[Any], number: int) -> str:
        del world
        site.cuts = 1
        return await make(fleet, site, name=f"far-{number}")

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world
        image = await shown(fleet, subject)
        if image is not None:
            if image.state != "available":
                return [f"{subject} {image.state}"]
            kept.update(file.sha256 for file in image.files)
        return sorted({path.name for path in store.directory.iterdir()} - kept)

    scenario = Scenario(registry=fleet.registry, program="image", make=make_one, leftovers=leftovers)
    assert await Harness(fleet.world, scenario).run(stride=3) > 3
