"""The life of an endpoint on hosts with fake drivers: replicas are made, answer, are lost, are scaled, go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, func, select

from controlplane.models.endpoint import Endpoint
from controlplane.models.gateway import GatewayVersion
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.nic import Nic
from controlplane.models.replica import Replica
from controlplane.models.replica_use import ReplicaUse
from controlplane.models.reservation import Reservation
from controlplane.models.route import Route
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.endpoint import queries
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.endpoint.errors import (
    EndpointContainersNotAllowed,
    EndpointGuestMissing,
    EndpointNoCapacity,
    EndpointNotAccelerated,
)
from controlplane.resources.image import service as images
from controlplane.resources.image.errors import ImageInUse
from controlplane.resources.model.plan import plan_of
from controlplane.resources.replica.probe import NotServed, models_in
from hostagent.protocol.wanted import KernelBoot, VmWanted
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.serving import MODEL, REGISTRY, Engines, create, import_model, listing


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, engines: Engines, monkeypatch) -> AsyncIterator[Fleet]:
    for module in ("replica", "endpoint"):
        for name in ("SOON_SECONDS", "LOOK_SECONDS"):
            monkeypatch.setattr(f"controlplane.resources.{module}.program.{name}", 0.2, raising=False)
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        fleet.links.stream = engines.open
        await import_model(fleet)
        yield fleet


async def change(fleet: Fleet, endpoint_id: str, action: Callable) -> None:
    async with fleet.database.session() as session:
        row = (await session.scalars(select(Endpoint).where(Endpoint.id == endpoint_id).with_for_update(key_share=True))).one()
        await action(session, row)
        row.generation += 1


async def shown(fleet: Fleet, endpoint_id: str) -> queries.ShownEndpoint | None:
    async with fleet.database.session() as session:
        row = await session.get(Endpoint, endpoint_id)
        return None if row is None else await queries.show(session, row)


async def until_status(fleet: Fleet, endpoint_id: str, status: str, *, settled: bool = True) -> queries.ShownEndpoint:
    async def is_so() -> bool:
        seen = await shown(fleet, endpoint_id)
        if seen is None or seen.status != status:
            return False
        return not settled or seen.row.observed_generation == seen.row.generation

    await fleet.until(is_so, f"{endpoint_id} {status}", 30)
    seen = await shown(fleet, endpoint_id)
    assert seen
    return seen


async def count(fleet: Fleet, model: type) -> int:
    async with fleet.database.session() as session:
        return await session.scalar(select(func.count()).select_from(model)) or 0


async def test_from_request_to_ready_and_back_to_nothing(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    endpoint_id = await create(fleet)
    async with fleet.running():
        seen = await until_status(fleet, endpoint_id, "ready")
        (replica,) = seen.replicas
        assert (replica.row.state, replica.host, replica.isolation, seen.routes) == ("ready", "a", "container", [MODEL])
        document = fake.agent.documents.get("vm", replica.row.vm_id)
        assert isinstance(document, VmWanted)
        assert document.workload
        assert document.disks == ()
        assert document.workload.argv[:2] == ("/usr/bin/python3", "-B")
        assert "/models/SmolLM2-135M-Instruct.Q4_1.gguf" in document.workload.argv
        assert replica.row.base_url == f"http://{document.nics[0].ipv4}:8000"
        async with fleet.database.session() as session:
            assert await session.scalar(select(GatewayVersion.version).where(GatewayVersion.topic == "routes")) >= 2
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_gone() -> bool:
            return await shown(fleet, endpoint_id) is None

        await fleet.until(is_gone, "gone", 30)
    assert await fleet.on_hosts() == []
    for model in (Replica, Route, Vm, Nic, Reservation):
        assert await count(fleet, model) == 0
    async with fleet.database.session() as session:
        assert await session.scalar(select(Host.reserved_vcpus)) == 0


async def test_ready_only_when_the_served_model_answers(fleet: Fleet, engines: Engines) -> None:
    await fleet.add_host("a")
    engines.says = None
    endpoint_id = await create(fleet)
    async with fleet.running():

        async def says(words: str) -> None:
            async def is_said() -> bool:
                seen = await shown(fleet, endpoint_id)
                return seen is not None and words in seen.conditions[1].message

            await fleet.until(is_said, words)

        await says("nobody listens")
        engines.says = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
        await says("it answers 503")
        engines.says = listing("another")
        await says(f"it serves another, not {MODEL}")
        assert (await shown(fleet, endpoint_id)).status == "starting"
        engines.says = listing("another", MODEL)
        await until_status(fleet, endpoint_id, "ready")


async def test_a_replica_that_stops_serving_gets_nothing_until_it_serves_again(fleet: Fleet, engines: Engines) -> None:
    await fleet.add_host("a")
    endpoint_id = await create(fleet, replicas=2)
    async with fleet.running():
        seen = await until_status(fleet, endpoint_id, "ready")
        engines.by_machine[seen.replicas[0].row.vm_id] = None
        seen = await until_status(fleet, endpoint_id, "degraded", settled=False)
        assert [replica.row.state for replica in seen.replicas] == ["unhealthy", "ready"]
        del engines.by_machine[seen.replicas[0].row.vm_id]
        await until_status(fleet, endpoint_id, "ready")


async def test_scale_up_and_down(fleet: Fleet) -> None:
    await fleet.add_host("a", cpus=3)
    endpoint_id = await create(fleet)
    async with fleet.running():
        await until_status(fleet, endpoint_id, "ready")
        await change(fleet, endpoint_id, lambda session, row: endpoints.scale(session, row, 3))
        seen = await until_status(fleet, endpoint_id, "ready")
        assert len(seen.replicas) == 3
        oldest = seen.replicas[0].row.id
        with pytest.raises(EndpointNoCapacity, match="wanted 5 replicas, room for 3: None of 1 hosts"):
            await change(fleet, endpoint_id, lambda session, row: endpoints.scale(session, row, 5))
        assert len((await shown(fleet, endpoint_id)).replicas) == 3, "all or nothing"
        await change(fleet, endpoint_id, lambda session, row: endpoints.scale(session, row, 1))

        async def is_one() -> bool:
            seen = await shown(fleet, endpoint_id)
            return seen is not None and len(seen.replicas) == 1

        await fleet.until(is_one, "one replica", 30)
        assert (await shown(fleet, endpoint_id)).replicas[0].row.id == oldest
        await change(fleet, endpoint_id, lambda session, row: endpoints.scale(session, row, 0))
        await until_status(fleet, endpoint_id, "idle")


async def test_no_room_makes_nothing_or_waits(fleet: Fleet) -> None:
    await fleet.add_host("a", cpus=1)
    with pytest.raises(EndpointNoCapacity, match="wanted 2 replicas, room for 1: None of 1 hosts"):
        await create(fleet, replicas=2)
    for model in (Endpoint, Replica, Vm, Reservation, Route):
        assert await count(fleet, model) == 0
    endpoint_id = await create(fleet, replicas=2, on_no_capacity="wait")
    async with fleet.running():
        seen = await until_status(fleet, endpoint_id, "degraded", settled=False)
        assert "without 1 free core" in seen.conditions[0].message
        await fleet.add_host("b", cpus=1, address=2)
        async with fleet.database.session() as session:
            from controlplane.placement.wake import wake_waiting

            await wake_waiting(session)
        await until_status(fleet, endpoint_id, "ready")


async def test_the_projects_policy_on_containers(fleet: Fleet) -> None:
    await fleet.add_host("a")
    assert fleet.project
    fleet.project.allow_containers = False
    with pytest.raises(EndpointContainersNotAllowed):
        await create(fleet, isolation="container")
    with pytest.raises(EndpointNotAccelerated, match="does not allow containers"):
        await create(fleet)


async def test_a_replica_in_a_vm_boots_a_guest_and_shares_engine_and_weights(fleet: Fleet) -> None:
    fake = await fleet.add_host("a")
    with pytest.raises(EndpointGuestMissing):
        await create(fleet, isolation="vm")
    await let_guests_run_workloads(fleet)
    endpoint_id = await create(fleet, isolation="vm", replicas=2)
    async with fleet.running():
        seen = await until_status(fleet, endpoint_id, "ready")
        assert seen.observed.isolation == "vm"
        assert seen.observed.isolation_reason == "asked for; no host has usable KVM, so it is emulated"
        documents = [fake.agent.documents.get("vm", replica.row.vm_id) for replica in seen.replicas]
        for document in documents:
            assert isinstance(document.boot, KernelBoot)
            assert [disk.is_boot for disk in document.disks] == [True]
            assert document.image_id == fleet.image.id == seen.row.spec["guest_image_id"]
            assert document.workload.root_image_id == seen.row.spec["engine_image_id"]
            assert [mount.path for mount in document.workload.mounts] == ["/models"]
        assert len({document.disks[0].volume_id for document in documents}) == 2
        assert [(replica.isolation, replica.driver, replica.accelerator) for replica in seen.replicas] == [
            ("vm", "fake", "tcg")
        ] * 2
        assert seen.row.memory_bytes == plan_of(seen.row.spec).memory_bytes("vm")
        own = {"network", "tunnel", "policy", "firewall"}  # of the host and of the network
        assert {kind for kind, _ in fake.agent.documents.ordered()} - own == {"image", "volume", "vm"}
        assert len(fake.agent.documents.all("image")) == 3
        await refuse_images(fleet, seen.row.spec)
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_gone() -> bool:
            return await shown(fleet, endpoint_id) is None

        await fleet.until(is_gone, "gone", 30)
    assert await fleet.on_hosts() == []
    for model in (Replica, Vm, Volume, Nic, Reservation):
        assert await count(fleet, model) == 0


async def let_guests_run_workloads(fleet: Fleet) -> None:
    async with fleet.database.session() as session:
        assert fleet.image
        (await session.get_one(Image, fleet.image.id)).runs_workloads = True


async def refuse_images(fleet: Fleet, spec: dict) -> None:
    """What machines, models and endpoints stand on is not deleted."""
    for name, user in (("guest_image_id", "vm"), ("engine_image_id", "vm"), ("weights_image_id", "vm")):
        async with fleet.database.session() as session:
            image = await session.get_one(Image, spec[name])
            with pytest.raises(ImageInUse, match=f"used by a {user}"):
                await images.remove(session, image)


@pytest.mark.parametrize(
    ("wanted", "has_kvm", "may_contain", "isolation", "needs_kvm"),
    [
        ("auto", True, True, "vm", True),
        ("auto", True, False, "vm", True),
        ("auto", False, True, "container", False),
        ("vm", True, True, "vm", True),
        ("vm", False, False, "vm", False),
        ("container", True, True, "container", False),
    ],
)
async def test_what_a_replica_is_and_why(
    fleet: Fleet, wanted: str, has_kvm: bool, may_contain: bool, isolation: str, needs_kvm: bool
) -> None:
    await fleet.add_host("a")
    await fleet.add_host("b", has_kvm=has_kvm, address=2)
    await let_guests_run_workloads(fleet)
    assert fleet.project
    fleet.project.allow_containers = may_contain
    endpoint_id = await create(fleet, isolation=wanted, replicas=2)
    seen = await shown(fleet, endpoint_id)
    assert seen is not None
    assert (seen.observed.isolation, seen.row.spec["needs_kvm"]) == (isolation, needs_kvm)
    assert ("KVM" in seen.observed.isolation_reason) == (wanted == "auto" or (wanted == "vm" and not has_kvm))
    hosts = {replica.host for replica in seen.replicas}
    assert hosts == {"b"} if needs_kvm else hosts <= {"a", "b"}


async def test_a_full_host_with_kvm_is_no_reason_to_emulate(fleet: Fleet) -> None:
    await fleet.add_host("a", cpus=8)
    await fleet.add_host("b", cpus=1, has_kvm=True, address=2)
    await let_guests_run_workloads(fleet)
    await create(fleet, isolation="vm")
    for wanted in ("vm", "auto"):
        with pytest.raises(EndpointNoCapacity) as full:
            await create(fleet, f"more-{wanted}", isolation=wanted, has_route=False)
        assert "without usable KVM" in str(full.value)


async def test_the_first_endpoints_made_at_once_share_one_network(fleet: Fleet) -> None:
    await fleet.add_host("a")
    made = await asyncio.gather(*(create(fleet, f"chat-{number}", has_route=False) for number in range(4)))
    assert len({(await shown(fleet, endpoint_id)).row.network_id for endpoint_id in made}) == 1


async def test_delete_in_the_middle_of_the_making(fleet: Fleet, engines: Engines) -> None:
    await fleet.add_host("a")
    engines.says = None
    endpoint_id = await create(fleet)
    async with fleet.running():
        await asyncio.sleep(0.3)
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_gone() -> bool:
            return await shown(fleet, endpoint_id) is None

        await fleet.until(is_gone, "gone", 30)
    assert await fleet.on_hosts() == []
    assert await count(fleet, Vm) == 0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b'HTTP/1.1 200 OK\r\n\r\n{"data": {}}',
        b"HTTP/1.1 200 OK\r\n\r\n[]",
    ],
)
def test_what_is_no_listing_is_not_served(answer: bytes) -> None:
    with pytest.raises(NotServed):
        models_in(answer)


async def use(fleet: Fleet, replica_id: str) -> None:
    """What a gateway says while an answer is open there."""
    async with fleet.database.session() as session:
        session.add(ReplicaUse(gateway="gw0", replica_id=replica_id))


async def test_a_replica_goes_when_its_last_open_answer_has_ended(fleet: Fleet) -> None:
    await fleet.add_host("a")
    endpoint_id = await create(fleet)
    async with fleet.running():
        (replica,) = (await until_status(fleet, endpoint_id, "ready")).replicas
        await use(fleet, replica.row.id)
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_withdrawn() -> bool:
            async with fleet.database.session() as session:
                row = await session.get_one(Replica, replica.row.id)
                return row.state == "deleting" and row.base_url is None

        await fleet.until(is_withdrawn, "withdrawn", 30)
        for _ in range(5):  # steps of 0.2 s each: time enough to go, were it not in use
            await asyncio.sleep(0.2)
            assert await count(fleet, Vm) == 1
        async with fleet.database.session() as session:
            await session.execute(delete(ReplicaUse))

        async def is_gone() -> bool:
            return await count(fleet, Replica) == 0

        await fleet.until(is_gone, "gone", 30)


async def test_a_replica_does_not_wait_for_answers_without_end(fleet: Fleet) -> None:
    await fleet.add_host("a")
    fleet.world.settings.gateway.__dict__["drain_seconds"] = 1
    endpoint_id = await create(fleet)
    async with fleet.running():
        (replica,) = (await until_status(fleet, endpoint_id, "ready")).replicas
        await use(fleet, replica.row.id)
        await change(fleet, endpoint_id, endpoints.remove)

        async def is_gone() -> bool:
            return await count(fleet, Replica) == 0

        await fleet.until(is_gone, "gone", 30)
