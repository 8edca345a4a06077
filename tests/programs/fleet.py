"""A small fleet in this process: real database and kernel, real agents with fake drivers, no network."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import SYSTEM
from controlplane.core.clock import SystemClock
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.kernel import service as kernel
from controlplane.kernel.database import Database
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.network import Network
from controlplane.models.project import Project
from controlplane.models.run import SHARDS, Run
from controlplane.models.vm import Vm
from controlplane.remote.fake import FakeLinks
from controlplane.resources.address.reconcile import AddressReconciler
from controlplane.resources.firewall.reconcile import FirewallReconciler
from controlplane.resources.host.reconcile import HostDocumentsReconciler, PolicyReconciler
from controlplane.resources.image import service as images
from controlplane.resources.image.program import ImageCopyProgram, ImageProgram
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.image.store import ImageStore
from controlplane.resources.loadbalancer.program import LoadbalancerProgram
from controlplane.resources.loadbalancer.reconcile import NoticesReconciler
from controlplane.resources.network import service as networks
from controlplane.resources.network.reconcile import HostRoutesReconciler, HostTunnelReconciler, RoutesReconciler
from controlplane.resources.network.schemas import NetworkCreate
from controlplane.resources.snapshot.program import SnapshotProgram
from controlplane.resources.vm import service as vms
from controlplane.resources.vm.program import VmProgram
from controlplane.resources.vm.schemas import VmCreate
from controlplane.resources.volume.program import VolumeProgram
from controlplane.settings import NetworkSettings, Settings
from tests.fakehost import FakeHost

GIB = 1 << 30
PROGRAMS = (
    VmProgram,
    VolumeProgram,
    SnapshotProgram,
    ImageCopyProgram,
    ImageProgram,
    RoutesReconciler,
    HostRoutesReconciler,
    HostTunnelReconciler,
    FirewallReconciler,
    HostDocumentsReconciler,
    PolicyReconciler,
    AddressReconciler,
    LoadbalancerProgram,
    NoticesReconciler,
)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE1lPw9bTVZkMOyUaCvAlGWYmLKVKwXuNvUSqxb0iTMx test"


class ToRunner:
    """Hands nudges straight to the runner, as a worker does with runs of its own shards."""

    runner: Runner | None = None

    def due(self, run_id: str, shard: int) -> None:
        del shard
        if self.runner is not None:
            self.runner.submit(run_id)


@dataclass
class Fleet:
    database: Database
    world: World[Any]
    registry: Registry
    links: FakeLinks
    root: Path
    hosts: dict[str, FakeHost] = field(default_factory=dict)
    project: Project | None = None
    image: Image | None = None
    network: Network | None = None

    async def add_host(
        self,
        name: str,
        *,
        cpus: int = 8,
        memory_bytes: int = 32 * GIB,
        address: int = 1,
        has_kvm: bool = False,
        roles: Sequence[str] = ("compute",),
    ) -> FakeHost:
        host_id = new_id(Kind.HOST)
        fake = (await FakeHost.open(host_id, self.root, cpus=cpus, memory_bytes=memory_bytes)).join(self.links)
        row = Host(
            id=host_id,
            name=name,
            roles=list(roles),
            address=f"{name}.test",
            state="ready",
            link="up",
            link_changed_at=func.now(),
            facts={"storage_drivers": ["fake"], "machine_drivers": ["fake"], "kvm": {"usable": has_kvm}},
            facts_at=func.now(),
            ssh_key_sealed=b"sealed",
            ssh_public_key="ssh-ed25519 AAAA",
            architecture="x86_64",
            machine_drivers=["fake"],
            allocatable_vcpus=cpus,
            allocatable_memory_bytes=memory_bytes,
            data_ipv4=f"192.0.2.{address}",
            data_ipv6=f"2001:db8::{address}",
            data_interface="data0",
            tunnel_driver="kernel",
            underlay_ipv4=f"192.0.2.{address}",
            underlay_ipv6=f"2001:db8::{address}",
            underlay_mtu_bytes=1500,
        )
        async with self.database.session() as session:
            session.add(row)
        self.hosts[host_id] = fake
        return fake

    async def lay_ground(self) -> None:
        """A project with a network, and an image whose files are in the store."""
        files = {"root.raw": b"root" * 1000, "vmlinuz": b"kernel", "initramfs": b"initramfs"}
        store = ImageStore(self.world.settings.state_dir)
        manifest = ImageManifest.model_validate(
            {
                "name": "debian",
                "architecture": "x86_64",
                "root_file": "root.raw",
                "min_disk_bytes": 1 << 20,
                "min_memory_bytes": 64 << 20,
                "boot": {"kind": "kernel", "kernel_file": "vmlinuz", "initramfs_file": "initramfs", "cmdline": "quiet"},
                "files": [
                    {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
                    for name, content in files.items()
                ],
            }
        )
        directory = self.root / "image"
        directory.mkdir()
        (directory / "manifest.json").write_text(manifest.model_dump_json())
        for name, content in files.items():
            (directory / name).write_bytes(content)
        taken = await images.take_directory(store, directory)
        async with self.database.session() as session:
            self.project = Project(id=new_id(Kind.PROJECT), name="ours")
            session.add(self.project)
            await session.flush()
            self.network = await networks.create(session, NetworkSettings(), self.project.id, NetworkCreate(name="net"))
            self.image = await images.create_of_stored(session, taken)

    async def create_network(self, name: str, encryption: Literal["wireguard", "none"]) -> Network:
        async with self.database.session() as session:
            assert self.project
            wanted = NetworkCreate(name=name, encryption=encryption)
            return await networks.create(session, NetworkSettings(), self.project.id, wanted)

    async def create_vm(self, name: str = "web", **wanted: Any) -> str:
        body = VmCreate.model_validate({"name": name, "image": "debian", "network": "net", "ssh_keys": [KEY], **wanted})
        async with self.database.session() as session:
            assert self.project
            return (
                await vms.create(session, self.project, SYSTEM, self.world.sealer, body, limits=self.world.settings.limits)
            ).id

    async def change(self, vm_id: str, action: Callable[[AsyncSession, Vm], Awaitable[object]]) -> None:
        """What the route frame does around an action: lock, change, raise the generation."""
        async with self.database.session() as session:
            vm = (await session.scalars(select(Vm).where(Vm.id == vm_id).with_for_update(key_share=True))).one()
            await action(session, vm)
            vm.generation += 1

    async def delete_vm(self, vm_id: str) -> None:
        await self.change(vm_id, vms.remove)

    async def vm(self, vm_id: str) -> Vm | None:
        async with self.database.session() as session:
            return await session.get(Vm, vm_id)

    async def run_of(self, program: str, subject: str) -> Run:
        async with self.database.session() as session:
            query = select(Run).where(Run.program == program, Run.subject == subject).order_by(Run.created_at.desc())
            return (await session.scalars(query.limit(1))).one()

    async def tell(self, program: str, subject: str, kind: str = "look") -> None:
        async with self.database.session() as session:
            await kernel.signal(session, program, subject, kind)

    async def on_hosts(self) -> list[str]:
        """Everything on every host, but images and what is the host's own or its networks', which outlive VMs.

        That firewalls without members go is the business of `test_firewall_life`.
        """
        found = [item for fake in self.hosts.values() for item in await fake.leftovers()]
        return [item for item in found if not item.startswith(("image ", "network ", "tunnel ", "policy ", "firewall "))]

    @asynccontextmanager
    async def running(self, *, max_steps_in_flight: int = 16) -> AsyncIterator[Runner]:
        """A worker at work."""
        publisher = self.database.publisher
        assert isinstance(publisher, ToRunner)
        async with Runner(world=self.world, registry=self.registry, max_steps_in_flight=max_steps_in_flight) as runner:
            publisher.runner = runner
            await runner.sweep(range(SHARDS))
            try:
                yield runner
            finally:
                publisher.runner = None

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 20) -> None:
        """Wait for the condition, within a deadline."""
        try:
            async with asyncio.timeout(seconds):
                while not await condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            async with self.database.session() as session:
                runs: Sequence[Run] = (await session.scalars(select(Run).where(Run.finished_at.is_(None)))).all()
                state = [
                    f"{run.program} {run.subject} {run.step} {run.attempt} {run.parked_code} {run.last_error}" for run in runs
                ]
                rows = [
                    (vm.name, vm.state, vm.generation, vm.observed_generation, vm.power, vm.observed_power)
                    for vm in await session.scalars(select(Vm))
                ]
            raise AssertionError(f"{what} not within {seconds} s; vms: {rows}; runs: {state}") from None

    async def until_ready(self, vm_id: str, seconds: float = 20) -> Vm:
        """Until the host has carried out the last change and the wanted power is seen."""

        async def is_ready() -> bool:
            vm = await self.vm(vm_id)
            return vm is not None and vm.observed_generation == vm.generation and vm.observed_power == vm.power

        await self.until(is_ready, f"{vm_id} ready", seconds)
        vm = await self.vm(vm_id)
        assert vm
        return vm

    async def until_gone(self, vm_id: str, seconds: float = 20) -> None:
        async def is_gone() -> bool:
            return await self.vm(vm_id) is None

        await self.until(is_gone, f"{vm_id} gone", seconds)


@asynccontextmanager
async def open_fleet(database_url: str, root: Path, registry: Registry | None = None) -> AsyncIterator[Fleet]:
    database = await Database.open(database_url, pool_size=20, publisher=ToRunner())
    links = FakeLinks()
    world = World(
        database=database,
        hosts=links,
        clock=SystemClock(),
        settings=Settings(state_dir=root / "state"),
        sealer=Sealer(bytes(32)),
    )
    fleet = Fleet(database=database, world=world, registry=registry or Registry(PROGRAMS), links=links, root=root)
    try:
        await fleet.lay_ground()
        yield fleet
    finally:
        for fake in fleet.hosts.values():
            await fake.close()
        await database.close()
