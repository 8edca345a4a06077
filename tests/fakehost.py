"""The real agent with fake drivers, in the test's own process: what FakeLinks plays hosts with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from controlplane.remote.fake import FakeLinks
from hostagent.drivers.fault import Faults
from hostagent.drivers.machine.fake import FakeMachine
from hostagent.drivers.network.fake import FakeLinks as FakeNetwork
from hostagent.drivers.network.fake import FakeRoutes, FakeTunnels
from hostagent.drivers.registry import fake_drivers
from hostagent.drivers.storage.fake import FakeStorage
from hostagent.drivers.supervisor.fake import FakeSupervisor
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.protocol.facts import CpuFact, HostFacts, KvmFact, NumaNodeFact
from hostagent.protocol.frames import Answer, Request
from hostagent.verbs import host, lifecycle, registry
from hostagent.verbs.context import Agent, open_agent

GIB = 1 << 30


@dataclass
class FakeHost:
    """`faults` plants failures (`faults.fail("machine.apply", AgentError(…))`, `faults.hold("storage.apply")`)."""

    id: str
    agent: Agent
    facts: HostFacts

    @classmethod
    async def open(cls, host_id: str, root: Path, *, cpus: int = 8, memory_bytes: int = 32 * GIB) -> FakeHost:
        agent = await open_agent(Paths.under(root / host_id), HostConfig(), fake_drivers(), version="fake")
        agent.settle_seconds = 5.0
        fake = cls(id=host_id, agent=agent, facts=fake_facts(host_id, cpus=cpus, memory_bytes=memory_bytes))

        async def learn() -> HostFacts:
            return fake.facts

        agent.learn_facts = learn
        fake.tunnels.name = host_id
        return fake

    def join(self, links: FakeLinks) -> FakeHost:
        links.add(self.id, self.answer, self.upload)
        return self

    async def answer(self, request: Request) -> Answer:
        return await registry.answer(self.agent, request)

    async def upload(self, sha256: str, content: bytes) -> None:
        assert hashlib.sha256(content).hexdigest() == sha256
        self.agent.paths.blobs.mkdir(parents=True, exist_ok=True)
        (self.agent.paths.blobs / sha256).write_bytes(content)

    async def leftovers(self) -> list[str]:
        """What is on the host, document or not; empty after everything was purged."""
        observed = await host.observe(self.agent, host.Nothing())
        return [f"{item.kind} {item.id} {item.state}" for item in observed.objects]

    async def look(self) -> None:
        """What the keeper does on its own: every object that is not as wanted is made so, once."""
        for kind_name, object_id in self.agent.documents.ordered():
            kind = host.KINDS[kind_name]
            document = self.agent.documents.get(kind_name, object_id)
            observed = await lifecycle.observe_one(self.agent, kind, object_id)
            if not kind.is_settled(document, observed):
                job = self.agent.jobs.current((kind_name, object_id)) or lifecycle.start_ensure(self.agent, kind, document)
                await self.agent.jobs.wait(job, 5.0)

    async def close(self) -> None:
        await self.agent.jobs.close()

    @property
    def faults(self) -> Faults:
        return self.machine.faults

    @property
    def machine(self) -> FakeMachine:
        machine = self.agent.drivers.machines["fake"]
        assert isinstance(machine, FakeMachine)
        return machine

    @property
    def supervisor(self) -> FakeSupervisor:
        assert isinstance(self.agent.drivers.supervisor, FakeSupervisor)
        return self.agent.drivers.supervisor

    @property
    def storage(self) -> FakeStorage:
        storage = self.agent.drivers.storages["fake"]
        assert isinstance(storage, FakeStorage)
        return storage

    @property
    def network(self) -> FakeNetwork:
        assert isinstance(self.agent.drivers.links, FakeNetwork)
        return self.agent.drivers.links

    @property
    def routes(self) -> FakeRoutes:
        assert isinstance(self.agent.drivers.routes, FakeRoutes)
        return self.agent.drivers.routes

    @property
    def tunnels(self) -> FakeTunnels:
        assert isinstance(self.agent.drivers.tunnels, FakeTunnels)
        return self.agent.drivers.tunnels


def fake_facts(hostname: str, *, cpus: int, memory_bytes: int) -> HostFacts:
    return HostFacts(
        hostname=hostname,
        architecture="x86_64",
        os_id="debian",
        os_version="12",
        kernel_version="6.1.0",
        boot_id="fake-boot",
        machine_id=hashlib.sha256(hostname.encode()).hexdigest()[:32],
        agent_version="fake",
        supervisor="fake",
        is_virtual_machine=False,
        schedulable_cpus=cpus,
        schedulable_memory_bytes=memory_bytes,
        state_free_bytes=100 * GIB,
        state_total_bytes=200 * GIB,
        kvm=KvmFact(device_present=False, usable=False, reason="fake"),
        machine_drivers=("fake",),
        storage_drivers=("fake",),
        tunnel_driver="kernel",
        cpus=tuple(CpuFact(id=i, core_id=i, socket_id=0, numa_node=0, siblings=(i,)) for i in range(cpus)),
        numa_nodes=(NumaNodeFact(id=0, memory_bytes=memory_bytes),),
    )
