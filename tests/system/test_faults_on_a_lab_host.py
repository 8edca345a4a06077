"""The kernel's harness against a real agent on a real host: crashes, stolen leases and `destroy` leave nothing there.

The guests are the guest image's kernel and initramfs over an empty disk: real QEMU, disk daemon, tap, routes and rules at
little cost; volume and nic live inside the VM's program. Replicas are real containers in which busybox answers as an engine
does; their weights go up by a stream. In each run some steps are destroyed, with and without a crash; `thorough` destroys
after every step. Fake hosts suffice for the other programs (tests/programs tries every step of them): firewalls, addresses,
load balancers and tunnels are documents whose repetition and removal the conformance suites try on real kernels.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness
from controlplane.kernel.registry import Registry
from controlplane.kernel.world import World
from controlplane.models.endpoint import Endpoint
from controlplane.models.host import Host
from controlplane.models.image import ImageCopy
from controlplane.models.nic import Nic
from controlplane.models.replica import Replica
from controlplane.models.reservation import Reservation
from controlplane.models.route import Route
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.host.program import HostPreflightProgram, HostProgram
from controlplane.resources.image import service as images
from controlplane.resources.image.copies import copy_on
from controlplane.resources.model.catalogue import Catalogue, MemoryArithmetic
from controlplane.resources.model.plan import Plan
from controlplane.resources.model.service import plan
from controlplane.resources.network import service as networks
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.resources.replica import service as replicas
from controlplane.settings import NetworkSettings
from tests.programs.fleet import PROGRAMS, Fleet, open_fleet
from tests.programs.serving import MODEL, REGISTRY, create, create_without_keeper, import_model
from tests.programs.test_resource_programs import rows_left
from tests.system.agenthost import AgentHost
from tests.system.enrolling import Deployment, difference, eventually, fingerprint, snapshot
from tests.system.faults import MIB, add_lab_host, few_lives, import_tiny_image, leaving_nothing, scenario
from tests.system.test_container import root_archive

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.caps("root", "netns", "sshd")]
machines = pytest.mark.caps("qemu", "qsd", "debootstrap")
containers = pytest.mark.caps("runc", "busybox")
STRIDE = 6
ENGINE = """
set -e
grep -q weights {weights}/{file}
mkdir /tmp/v1
echo '{{"object":"list","data":[{{"id":"{served_model_id}"}}]}}' > /tmp/v1/models
exec httpd -f -p {port} -h /tmp
"""


@pytest.fixture
async def agent(lab) -> AgentHost:
    made = AgentHost(lab.host("a"))
    if not made.socket.exists():
        made.install()
    await made.ready()
    return made


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, agent: AgentHost) -> AsyncIterator[Fleet]:
    """Database and kernel in this process, the agent on the lab host behind them."""
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        await add_lab_host(fleet, agent)
        async with fleet.database.session() as session:
            assert fleet.project is not None
            plain = NetworkCreate(name="plain", encryption="none")
            await networks.create(session, NetworkSettings(), fleet.project.id, plain)
        yield fleet


async def observed(agent: AgentHost) -> list[str]:
    return [f"{kind} {name}" for kind, name in await agent.observe() if kind in {"vm", "volume", "nic"}]


async def lives_of_machines(fleet: Fleet, agent: AgentHost, stride: int) -> int:
    await import_tiny_image(fleet, fleet.root / "tiny")

    async def make(world: World[Any], number: int) -> str:
        del world
        return await fleet.create_vm(f"vm-{number}", image="tiny", network="plain", vcpus=1, memory_bytes=128 * MIB)

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await observed(agent) + await rows_left(fleet, Vm, Nic, Volume, Reservation)

    tried = scenario(fleet.registry, "vm", make, leftovers, ("changed",))
    return await leaving_nothing(fleet, agent, tried, lambda harness: harness.run(stride=stride))


@machines
async def test_lives_of_machines_leave_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_machines(fleet, agent, STRIDE) >= 7


@machines
@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_every_life_of_machines_leaves_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_machines(fleet, agent, 1) >= 20


Lives = Callable[[Harness], Awaitable[int]]


async def import_engine(fleet: Fleet) -> None:
    """The shipped model with tiny weights, served by busybox."""
    shipped = plan(Catalogue.of(fleet.root), MODEL)
    files = {"weights": (shipped.model.files[0].name, b"weights\n"), "engine": ("root.tar", root_archive())}
    tiny = {
        "memory": MemoryArithmetic(kv_bytes_per_token=0, overhead_bytes=0),
        "files": tuple(file.model_copy(update={"size_bytes": 8}) for file in shipped.model.files),
    }
    engine = shipped.engine.model_copy(update={"argv": ("/bin/sh", "-c", ENGINE), "env": {}})
    await import_model(fleet, Plan(model=shipped.model.model_copy(update=tiny), engine=engine), files)


async def lives_of_replicas(fleet: Fleet, agent: AgentHost, lives: Lives) -> int:
    await import_engine(fleet)
    wanted = {"network": "plain", "isolation": "container", "vcpus": 1, "memory_bytes": 128 * MIB}
    endpoint_id = await create_without_keeper(fleet, **wanted)

    async def make(world: World[Any], number: int) -> str:
        del number
        async with world.database.session() as session:
            return (await replicas.create(session, await session.get_one(Endpoint, endpoint_id)))[0].id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await observed(agent) + await rows_left(fleet, Replica, Vm, Nic, Reservation)

    return await leaving_nothing(fleet, agent, scenario(fleet.registry, "replica", make, leftovers, ("look",)), lives)


async def lives_of_endpoints(fleet: Fleet, agent: AgentHost, lives: Lives) -> int:
    await import_engine(fleet)
    wanted = {"network": "plain", "isolation": "container", "vcpus": 1, "memory_bytes": 128 * MIB}

    async def make(world: World[Any], number: int) -> str:
        del world
        return await create(fleet, f"chat-{number}", route=f"chat-{number}", **wanted)

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return await observed(agent) + await rows_left(fleet, Endpoint, Replica, Vm, Nic, Reservation, Route)

    return await leaving_nothing(fleet, agent, scenario(fleet.registry, "endpoint", make, leftovers, ("replica",)), lives)


@containers
async def test_lives_of_replicas_leave_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_replicas(fleet, agent, lambda harness: few_lives(harness, 2)) == 3


@containers
async def test_lives_of_endpoints_leave_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_endpoints(fleet, agent, lambda harness: few_lives(harness, 4)) == 3


@containers
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lives", [lives_of_replicas, lives_of_endpoints])
async def test_every_life_of_replicas_and_endpoints_leaves_nothing_on_the_host(fleet: Fleet, agent: AgentHost, lives) -> None:
    assert await lives(fleet, agent, lambda harness: harness.run()) > 5


async def lives_of_hosts(deployment: Deployment, lab, lives: Lives) -> int:
    """Enrolled and removed over real SSH; nobody else works on the runs."""
    host = lab.host("b")
    deployment.pause()
    await deployment.bootstrap(host)
    before = snapshot(host)

    async def make(world: World[Any], number: int) -> str:
        del world
        body = deployment.body(host, name=f"b-{number}", host_key_fingerprint=fingerprint(host))
        answer = await deployment.client.post("/v1/hosts", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        async with world.database.session() as session:
            found = list(await session.scalars(select(Host.name).where(Host.id == subject)))
        try:
            await eventually(lambda: difference(before, snapshot(host)) == {}, lambda: difference(before, snapshot(host)), 10)
        except AssertionError as error:
            found.append(str(error)[:2000])
        return found

    registry = Registry((*PROGRAMS, HostProgram, HostPreflightProgram))
    return await lives(Harness(deployment.runner.world, scenario(registry, "host", make, leftovers, ("changed",))))


async def test_lives_of_hosts_leave_nothing_on_them(deployment: Deployment, lab) -> None:
    assert await lives_of_hosts(deployment, lab, lambda harness: few_lives(harness, 2)) == 3


@pytest.mark.thorough
@pytest.mark.timeout(1800)
async def test_every_life_of_hosts_leaves_nothing_on_them(deployment: Deployment, lab) -> None:
    assert await lives_of_hosts(deployment, lab, lambda harness: harness.run()) > 5


async def test_lives_of_image_copies_leave_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    image_of: dict[str, str] = {}
    blobs = agent.host.disk / "var/lib/bedplate/images"

    def files() -> set[str]:
        return {str(path) for path in blobs.rglob("*") if path.is_file()}

    before = files()

    async def make(world: World[Any], number: int) -> str:
        async with world.database.session() as session:
            manifest = await images.read_manifest(fleet.root / "image")
            image_id = (await images.create(session, manifest, name=f"image-{number}")).id
            host_id = (await session.scalars(select(Host.id))).one()
            copy_id = await copy_on(session, image_id=image_id, host_id=host_id)
            await kernel.start(session, "image_copy", copy_id, host_id=host_id)
        image_of[copy_id] = image_id
        return copy_id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world
        there = [name for kind, name in await agent.observe() if kind == "image" and name == image_of[subject]]
        return there + sorted(files() - before) + await rows_left(fleet, ImageCopy)

    tried = scenario(fleet.registry, "image_copy", make, leftovers, ("look",))
    assert await Harness(fleet.world, tried).run() > 5
