"""Two compute hosts and two edge hosts in memory, for tests of what edges are told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from controlplane.kernel import service as kernel
from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.resources.address import service as addresses
from controlplane.resources.address.schemas import AddressReserve
from controlplane.resources.loadbalancer import service as loadbalancers
from controlplane.resources.loadbalancer.queries import ShownLoadbalancer, show
from controlplane.resources.loadbalancer.schemas import LoadbalancerCreate
from controlplane.resources.pool import service as pools
from controlplane.resources.pool.schemas import PoolCreate
from controlplane.settings import LimitSettings
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.told import ToldHost

WEB = {"listeners": [{"port": 80, "target_port": 8080}], "drain_seconds": 0}


@dataclass
class Edges:
    """Two compute hosts a and b, two edge hosts e and f, a pool."""

    fleet: Fleet
    hosts: dict[str, ToldHost]

    async def reserve(self, name: str = "front") -> str:
        assert self.fleet.project
        async with self.fleet.database.session() as session:
            wanted = AddressReserve.model_validate({"name": name})
            return (await addresses.reserve(session, LimitSettings(), self.fleet.project.id, wanted)).id

    async def balancer(self, name: str = "web", **wanted: Any) -> str:
        assert self.fleet.project
        body = LoadbalancerCreate.model_validate({"name": name, **WEB, **wanted})
        async with self.fleet.database.session() as session:
            return (await loadbalancers.create(session, LimitSettings(), self.fleet.project.id, body)).id

    async def change(self, model: type, row_id: str, action: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        async with self.fleet.database.session() as session:
            row = await session.get_one(model, row_id, with_for_update={"key_share": True})
            await action(session, row, *arguments)

    async def show(self, row_id: str) -> ShownLoadbalancer | None:
        async with self.fleet.database.session() as session:
            row = await session.get(Loadbalancer, row_id)
            return None if row is None else await show(session, row)

    def holding(self, kind: str, object_id: str) -> list[str]:
        """Without those that only stand by."""
        found = {name: told.of(kind, object_id) for name, told in self.hosts.items()}
        return [name for name, document in found.items() if document and not getattr(document, "standby_for", "")]

    async def until_held(self, kind: str, object_id: str, names: Sequence[str]) -> None:
        async def is_held() -> bool:
            return self.holding(kind, object_id) == list(names)

        await self.fleet.until(is_held, f"{kind} held by {names}, not {self.holding(kind, object_id)}")

    async def until_settled(self, model: Any, row_id: str) -> None:
        async def is_settled() -> bool:
            async with self.fleet.database.session() as session:
                row = await session.get_one(model, row_id)
                return row.observed_generation == row.generation

        await self.fleet.until(is_settled, f"{row_id} settled")

    async def lose(self, name: str) -> None:
        self.fleet.links.cut(self.hosts[name].id)
        await self._link(name, "lost")

    async def found(self, name: str) -> None:
        await self._link(name, "up")

    async def _link(self, name: str, link: str) -> None:
        """As the watch says it, with the signals that it sends."""
        host_id = self.hosts[name].id
        async with self.fleet.database.session() as session:
            (await session.get_one(Host, host_id)).link = link
            await kernel.signal(session, "host_documents", host_id, "link")
            for row in await session.scalars(select(HostDocument).where(HostDocument.host_id == host_id)):
                await kernel.signal(session, row.kind, row.object_id, "link")


@pytest.fixture
async def edges(database_url: str, tmp_path: Path) -> AsyncIterator[Edges]:
    async with open_fleet(database_url, tmp_path) as fleet:
        hosts = {}
        for number, name in enumerate("abef", 1):
            roles = ("edge",) if name in "ef" else ("compute",)
            fake = await fleet.add_host(name, address=number, roles=roles, cpus=2)
            hosts[name] = ToldHost.before(fake, fleet.links)
        async with fleet.database.session() as session:
            await pools.create(session, PoolCreate.model_validate({"name": "uplink", "cidr": "203.0.113.0/24"}))
        yield Edges(fleet, hosts)


async def two_vms(edges: Edges) -> tuple[str, str]:
    """One on a, one on b (or the other way round): names of the hosts."""
    found = []
    for name in ("one", "two"):
        vm = await edges.fleet.until_ready(await edges.fleet.create_vm(name, vcpus=2))
        found.append(next(host for host, told in edges.hosts.items() if told.id == vm.host_id))
    assert sorted(found) == ["a", "b"]
    return found[0], found[1]
