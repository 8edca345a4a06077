"""The kernel's harness against a real agent on a real host: crashes, stolen leases and `destroy` leave nothing there.

The guests are the guest image's kernel and initramfs over an empty disk: real QEMU, disk daemon, tap, routes and rules at
little cost; volume and nic live inside the VM's program. In each run every sixth step is destroyed, with and without a
crash; `thorough` destroys after every step. Fake hosts suffice for the other programs (tests/programs tries every step of
them): replicas and endpoints are machines by the same verbs, with probes beside them that change nothing on a host; firewalls,
addresses, load balancers and tunnels are documents whose repetition and removal the conformance suites try on real
kernels; a host's own program is tried over real SSH by test_enrolment, which compares the host before and after.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select

from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.image import ImageCopy
from controlplane.models.nic import Nic
from controlplane.models.reservation import Reservation
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.host.learned import learn
from controlplane.resources.image import service as images
from controlplane.resources.image.copies import copy_on
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.image.store import ImageStore
from controlplane.resources.network import service as networks
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.settings import NetworkSettings
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import Nothing
from provisioning.images.build import build
from provisioning.images.manifest import read_manifest
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.test_resource_programs import rows_left
from tests.system.agenthost import AgentHost

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "debootstrap"),
]
MIB = 1 << 20
STRIDE = 6
PATIENCE = 60  # rounds of 0.3 s at least
SETTLED_SECONDS = 10.0


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
    async with open_fleet(database_url, tmp_path) as fleet:
        await add_lab_host(fleet, agent)
        await import_tiny_image(fleet, tmp_path / "tiny")
        async with fleet.database.session() as session:
            assert fleet.project is not None
            plain = NetworkCreate(name="plain", encryption="none")
            await networks.create(session, NetworkSettings(), fleet.project.id, plain)
        yield fleet


async def add_lab_host(fleet: Fleet, agent: AgentHost) -> None:
    host_id = new_id(Kind.HOST)

    async def answer(request: Request) -> Answer:
        try:
            return await agent.answer(request)
        except (OSError, ConnectionError) as error:
            raise TimeoutError(str(error)) from error

    async def upload(sha256: str, content: bytes) -> None:
        await asyncio.to_thread(agent.put_blob, sha256, content)

    fleet.links.add(host_id, answer, upload)
    row = Host(
        id=host_id,
        name="lab",
        address=agent.host.record.address,
        state="ready",
        link="up",
        link_changed_at=func.now(),
        ssh_key_sealed=b"sealed",
        ssh_public_key="ssh-ed25519 AAAA",
        roles=["compute"],
        config={"qemu_on_kvm": True},
        conditions=[],
    )
    learn(row, await agent.call("facts.observe", Nothing()), fleet.world.clock.now())
    async with fleet.database.session() as session:
        session.add(row)


async def import_tiny_image(fleet: Fleet, directory: Path) -> None:
    """The guest image's kernel and initramfs over an empty disk."""
    built = await asyncio.to_thread(build)
    manifest = read_manifest(built)
    directory.mkdir()
    contents = {
        manifest.boot.kernel_file: (built / manifest.boot.kernel_file).read_bytes(),
        manifest.boot.initramfs_file: (built / manifest.boot.initramfs_file).read_bytes(),
        "root.raw": bytes(MIB),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    tiny = ImageManifest.model_validate(
        {
            "name": "tiny",
            "architecture": "x86_64",
            "root_file": "root.raw",
            "min_disk_bytes": 16 * MIB,
            "min_memory_bytes": 128 * MIB,
            "boot": {
                "kind": "kernel",
                "kernel_file": manifest.boot.kernel_file,
                "initramfs_file": manifest.boot.initramfs_file,
                "cmdline": manifest.boot.cmdline,
            },
            "files": [
                {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
                for name, content in contents.items()
            ],
        }
    )
    (directory / "manifest.json").write_text(tiny.model_dump_json())
    taken = await images.take_directory(ImageStore(fleet.world.settings.state_dir), directory)
    async with fleet.database.session() as session:
        await images.create_of_stored(session, taken)


async def more_than(agent: AgentHost, before: dict[str, list[str]]) -> list[str]:
    """What is on the host now and was not before; what is just ending gets a moment."""
    end = time.monotonic() + SETTLED_SECONDS
    while True:
        now = await asyncio.to_thread(agent.leftovers)
        found = [f"{what}: {item}" for what in now for item in now[what] if item not in before[what]]
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


async def let_the_host_work(world: World[Any], subject: str, step: str) -> None:
    del world, subject, step
    await asyncio.sleep(0.3)


def rules(agent: AgentHost) -> list[str]:
    """Every rule and element on the host, without counters."""
    return sorted(agent.host.exec(["nft", "--stateless", "list", "ruleset"]).stdout.decode().splitlines())


async def lives_of_machines(fleet: Fleet, agent: AgentHost, stride: int) -> int:
    """How many lives left nothing. What the host has of its own (policy, tunnel) comes with the first machine and stays."""

    async def make(world: World[Any], number: int) -> str:
        del world
        return await fleet.create_vm(f"vm-{number}", image="tiny", network="plain", vcpus=1, memory_bytes=128 * MIB)

    async def on_paper(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        observed = [f"{kind} {name}" for kind, name in await agent.observe() if kind in {"vm", "volume", "nic"}]
        return observed + await rows_left(fleet, Vm, Nic, Volume, Reservation)

    scenario = Scenario(
        registry=fleet.registry,
        program="vm",
        make=make,
        leftovers=on_paper,
        nudge=let_the_host_work,
        changes=("changed",),
        patience=PATIENCE,
    )
    await Harness(fleet.world, scenario).life()
    before, rules_before = agent.leftovers(), rules(agent)

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        found = [*await on_paper(world, subject), *await more_than(agent, before)]
        return found + [f"rule {line.strip()}" for line in rules(agent) if line not in rules_before]

    lives = await Harness(fleet.world, replace(scenario, leftovers=leftovers)).run(stride=stride)
    after = agent.leftovers()
    assert {what: len(items) for what, items in after.items()} == {what: len(items) for what, items in before.items()}
    return lives


async def test_lives_of_machines_leave_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_machines(fleet, agent, STRIDE) >= 7


@pytest.mark.thorough
@pytest.mark.timeout(900)
async def test_every_life_of_machines_leaves_nothing_on_the_host(fleet: Fleet, agent: AgentHost) -> None:
    assert await lives_of_machines(fleet, agent, 1) >= 20


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

    scenario = Scenario(
        registry=fleet.registry,
        program="image_copy",
        make=make,
        leftovers=leftovers,
        nudge=let_the_host_work,
        changes=("look",),
        patience=PATIENCE,
    )
    assert await Harness(fleet.world, scenario).run() > 5
