"""The programs of models, endpoints and replicas, tried by the harness on the real agent with fake drivers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.registry import Registry
from controlplane.kernel.world import World
from controlplane.models.endpoint import Endpoint
from controlplane.models.endpoint_revision import EndpointRevision
from controlplane.models.event import Event
from controlplane.models.host import Host
from controlplane.models.image import Blob, Image
from controlplane.models.model import Model
from controlplane.models.nic import Nic
from controlplane.models.replica import Replica
from controlplane.models.reservation import Reservation
from controlplane.models.route import Route
from controlplane.models.vm import Vm
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.endpoint.schemas import EndpointUpdate, RolloutStrategy
from controlplane.resources.image.store import ImageStore
from controlplane.resources.model import service as models
from controlplane.resources.model.catalogue import Catalogue, DirectorySource, UrlSource
from controlplane.resources.model.plan import Plan
from controlplane.resources.model.program import ModelProgram
from controlplane.resources.replica import service as replicas
from tests.programs.fleet import PROGRAMS, Fleet, open_fleet
from tests.programs.serving import MODEL, REGISTRY, Engines, create, create_without_keeper, import_model
from tests.programs.site import Site


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        await fleet.add_host("a")
        fleet.links.stream = Engines().open
        await import_model(fleet)
        yield fleet


async def rows_left(fleet: Fleet, *kinds: Any) -> list[str]:
    async with fleet.database.session() as session:
        counts = [(kind.__tablename__, await session.scalar(select(func.count()).select_from(kind))) for kind in kinds]
        held = await session.scalar(select(func.sum(Host.reserved_vcpus + Host.reserved_memory_bytes)))
    return [f"{count} rows of {name}" for name, count in counts if count] + ([f"{held} reserved"] if held else [])


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_endpoint(fleet: Fleet) -> None:
    async def make(world: World[Any], number: int) -> str:
        del world
        return await create(fleet, f"chat-{number}", route=f"chat-{number}")

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await fleet.on_hosts() + await rows_left(fleet, Endpoint, Replica, Vm, Nic, Reservation, Route)

    scenario = Scenario(registry=fleet.registry, program="endpoint", make=make, leftovers=leftovers, changes=("replica",))
    assert await Harness(fleet.world, scenario).run(stride=4) > 3


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_endpoint_rolled_out(fleet: Fleet) -> None:
    """Another shape is asked for while the first replica starts: the exchange is tried at each of its steps too."""
    other = EndpointUpdate(vcpus=2, rollout=RolloutStrategy(watch_seconds=0, ramp_seconds=0))

    async def make(world: World[Any], number: int) -> str:
        del world
        endpoint_id = await create(fleet, f"chat-{number}", route=f"chat-{number}")
        async with fleet.database.session() as session:
            await endpoints.update(session, await session.get_one(Endpoint, endpoint_id), other)
        return endpoint_id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await fleet.on_hosts() + await rows_left(fleet, Endpoint, EndpointRevision, Replica, Vm, Nic, Reservation, Route)

    scenario = Scenario(registry=fleet.registry, program="endpoint", make=make, leftovers=leftovers, changes=("replica",))
    assert await Harness(fleet.world, scenario).run(stride=4) > 3
    async with fleet.database.session() as session:
        assert await session.scalar(select(func.count()).where(Event.kind == "endpoint.rolled_out"))


@pytest.mark.slow
async def test_replica(fleet: Fleet) -> None:
    endpoint_id = await create_without_keeper(fleet)

    async def make(world: World[Any], number: int) -> str:
        del number
        async with world.database.session() as session:
            return (await replicas.create(session, await session.get_one(Endpoint, endpoint_id)))[0].id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await fleet.on_hosts() + await rows_left(fleet, Replica, Vm, Nic, Reservation)

    scenario = Scenario(registry=fleet.registry, program="replica", make=make, leftovers=leftovers, changes=("look",))
    assert await Harness(fleet.world, scenario).life() > 15, "it came to serve"
    assert await Harness(fleet.world, scenario).run(stride=2) > 5


@pytest.fixture
def entry(tmp_path: Path, monkeypatch) -> Plan:
    """The shipped model with weights from a directory, and an engine that is built at once."""
    found = Catalogue.of(tmp_path).look()
    model, engine = found.models[MODEL], found.engines["llama-cpp"]
    (tmp_path / "w").mkdir()
    content = b"weights"
    (tmp_path / "w" / model.files[0].name).write_bytes(content)
    file = model.files[0].model_copy(
        update={
            "sha256": hashlib.sha256(content).hexdigest(),
            "size_bytes": len(content),
            "source": DirectorySource(kind="directory", directory=str(tmp_path / "w")),
        }
    )
    (tmp_path / "root.tar.zst").write_bytes(b"engine")
    monkeypatch.setattr(
        "controlplane.resources.model.program.build_engine", lambda recipe, cache, *, mirror: tmp_path / "root.tar.zst"
    )
    return Plan(model=model.model_copy(update={"name": "tiny", "files": (file,)}), engine=engine)


async def test_model(database_url: str, tmp_path: Path, entry: Plan) -> None:
    async with open_fleet(database_url, tmp_path, Registry((*PROGRAMS, ModelProgram))) as fleet:

        async def make(world: World[Any], number: int) -> str:
            async with world.database.session() as session:
                model = entry.model.model_copy(update={"name": f"tiny-{number}"})
                return (await models.import_(session, Plan(model=model, engine=entry.engine))).id

        async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
            """Images stay; what must not be is a second one of the same content, or one without its bytes."""
            async with world.database.session() as session:
                names = list(await session.scalars(select(Image.name)))
                states = set(await session.scalars(select(Image.state)))
            return [f"images {names}"] if len(names) != len(set(names)) or states != {"available"} else []

        scenario = Scenario(registry=fleet.registry, program="model", make=make, leftovers=leftovers, changes=("start",))
        assert await Harness(fleet.world, scenario).run() > 3


async def test_an_import_ends_available_and_a_changed_entry_is_taken(database_url: str, tmp_path: Path, entry: Plan) -> None:
    async with open_fleet(database_url, tmp_path, Registry((*PROGRAMS, ModelProgram))) as fleet, fleet.running():

        async def import_(plan: Plan) -> Model:
            async with fleet.database.session() as session:
                model_id = (await models.import_(session, plan)).id

            async def is_available() -> bool:
                async with fleet.database.session() as session:
                    row = await session.get_one(Model, model_id)
                    return row.state == "available" and row.digest == plan.digest

            await fleet.until(is_available, "available")
            async with fleet.database.session() as session:
                return await session.get_one(Model, model_id)

        first = await import_(entry)
        again = await import_(entry)
        assert (first.id, first.weights_image_id, first.generation) == (again.id, again.weights_image_id, again.generation)
        other = Plan(model=entry.model.model_copy(update={"context_tokens": 256}), engine=entry.engine)
        changed = await import_(other)
        assert (changed.id, changed.generation, changed.observed_generation) == (first.id, 2, 2)
        assert changed.weights_image_id == first.weights_image_id, "the same bytes are the same image"
        async with fleet.database.session() as session:
            assert await session.scalar(select(func.count()).select_from(Blob)) == 5, "two of ours, three of the guest image"


async def test_weights_by_url_are_fetched_and_verified(database_url: str, tmp_path: Path, entry: Plan, site: Site) -> None:
    content = os.urandom(3 << 20)
    site.files, site.cuts = {"weights": content}, 1
    source = UrlSource(kind="url", url=f"{site.url}/weights")
    digest = hashlib.sha256(content).hexdigest()
    file = entry.model.files[0].model_copy(update={"sha256": digest, "size_bytes": len(content), "source": source})
    plan = Plan(model=entry.model.model_copy(update={"files": (file,)}), engine=entry.engine)
    async with open_fleet(database_url, tmp_path, Registry((*PROGRAMS, ModelProgram))) as fleet, fleet.running():
        async with fleet.database.session() as session:
            model_id = (await models.import_(session, plan)).id

        async def is_available() -> bool:
            async with fleet.database.session() as session:
                return (await session.get_one(Model, model_id)).state == "available"

        await fleet.until(is_available, "available")
        async with fleet.database.session() as session:
            assert (await session.get_one(Model, model_id)).fetched_bytes == len(content)
        assert ImageStore(fleet.world.settings.state_dir).path(digest).read_bytes() == content
        assert len(site.asked) == 2, "the second time only for the rest"


async def test_weights_that_are_not_what_the_entry_says_park_the_import(database_url: str, tmp_path: Path, entry: Plan) -> None:
    (tmp_path / "w" / entry.model.files[0].name).write_bytes(b"other")
    async with open_fleet(database_url, tmp_path, Registry((*PROGRAMS, ModelProgram))) as fleet, fleet.running():
        async with fleet.database.session() as session:
            model_id = (await models.import_(session, entry)).id

        async def is_parked() -> bool:
            return (await fleet.run_of("model", model_id)).parked_code == "model.fetch_failed"

        await fleet.until(is_parked, "parked")
        (tmp_path / "w" / entry.model.files[0].name).write_bytes(b"weights")
        async with fleet.database.session() as session:
            await models.import_(session, entry)

        async def is_available() -> bool:
            async with fleet.database.session() as session:
                return (await session.get_one(Model, model_id)).state == "available"

        await fleet.until(is_available, "available after the repair")
