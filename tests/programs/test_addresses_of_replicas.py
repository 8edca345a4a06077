"""A replica that goes and one that comes: whoever still sends to the first never reaches the second.

The engines listen for real on the addresses that their machines were given: the pool lies in 127.0.0.0/8.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path

import aiohttp
import pytest
from sqlalchemy import select, update

from controlplane.gateway.keeper import Keeper
from controlplane.gateway.server import listening
from controlplane.models.nic import Nic, RestingAddress
from controlplane.models.replica import Replica
from controlplane.models.vm import Vm
from controlplane.resources.endpoint import service as endpoints
from controlplane.resources.nic.service import REST
from controlplane.settings import GatewaySettings, Settings
from hostagent.protocol.wanted import VmWanted
from tests.api.gateway.conftest import Fleet as Rows
from tests.api.gateway.conftest import RunningGateway
from tests.api.gateway.mock_engine import MockEngine
from tests.api.gateway.talk import CHAT, post
from tests.fakehost import FakeHost
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.serving import REGISTRY, Engines, create, import_model
from tests.programs.test_endpoint_life import change, shown, until_status

HELD_SECONDS = 2.0


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path, monkeypatch) -> AsyncIterator[Fleet]:
    for module in ("replica", "endpoint"):
        for name in ("SOON_SECONDS", "LOOK_SECONDS"):
            monkeypatch.setattr(f"controlplane.resources.{module}.program.{name}", 0.2, raising=False)
    async with open_fleet(database_url, tmp_path, REGISTRY) as fleet:
        fleet.world.settings.network.__dict__["ipv4_pool"] = IPv4Network(f"127.{64 + os.getpid() % 128}.0.0/16")
        fleet.links.stream = Engines().open
        await import_model(fleet)
        yield fleet


@dataclass
class Machines:
    """Gives every machine of the host an engine on its address; what arrived there, by machine."""

    fake: FakeHost
    engines: dict[str, MockEngine] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)

    async def follow(self) -> None:
        documents = self.fake.agent.documents
        try:
            while True:
                wanted = {name: documents.get("vm", name) for kind, name in documents.ordered() if kind == "vm"}
                for name in self.engines.keys() - wanted.keys():
                    await self.engines.pop(name).stop()
                for name in wanted.keys() - self.engines.keys():
                    await self._start(name, wanted[name])
                await asyncio.sleep(0.01)
        finally:
            for engine in self.engines.values():
                await engine.stop()

    async def _start(self, name: str, document: object) -> None:
        assert isinstance(document, VmWanted)
        engine = MockEngine()
        seen = self.seen.setdefault(name, [])
        well_behaved = engine.answer

        async def answer(request, peer) -> None:
            seen.append(request.headers["x-bedplate-route"])
            await well_behaved(request, peer)

        engine.answer = answer
        await engine.start(8000, document.nics[0].ipv4)
        self.engines[name] = engine


@asynccontextmanager
async def at_work(fleet: Fleet, database_url: str) -> AsyncIterator[tuple[Machines, RunningGateway]]:
    """A worker, engines on a host, and a gateway with a key."""
    machines = Machines(await fleet.add_host("a"))
    assert fleet.project
    key = await Rows(database_url, project_id=fleet.project.id).key()
    settings = Settings(
        state_dir=fleet.root, database={"url": database_url}, gateway=GatewaySettings(listen="127.0.0.1:0", instance="gw0")
    )
    following = asyncio.create_task(machines.follow())
    try:
        async with fleet.running(), listening(settings) as (app, server, url):
            yield machines, RunningGateway(url=url, app=app, key=key)
            server.should_exit = True
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def test_who_still_sends_to_a_replica_that_went_never_reaches_the_next_one(
    fleet: Fleet, database_url: str, monkeypatch
) -> None:
    """The gateway hears late, signals wake the run early, and a new endpoint is made in the same moment."""
    hears = asyncio.Event()
    hears.set()
    look = Keeper._look

    async def late(self: Keeper, connection) -> None:
        await hears.wait()
        await look(self, connection)

    monkeypatch.setattr(Keeper, "_look", late)
    async with at_work(fleet, database_url) as (machines, gateway), aiohttp.ClientSession() as http:
        first = await create(fleet, "a", route="a")
        (replica,) = (await until_status(fleet, first, "ready")).replicas
        await gateway.fresh()
        assert (await post(http, gateway, {**CHAT, "model": "a"}))[0] == 200
        hears.clear()
        await change(fleet, first, endpoints.remove)
        second = await create(fleet, "b", route="b")
        await until_status(fleet, second, "ready")
        await _stays(fleet, replica.row.id, lambda: post(http, gateway, {**CHAT, "model": "a"}))
        hears.set()

        async def is_gone() -> bool:
            await post(http, gateway, {**CHAT, "model": "a"})
            return await shown(fleet, first) is None

        await fleet.until(is_gone, "gone", 30)
        third = await create(fleet, "c", route="c")
        await until_status(fleet, third, "ready")
        await gateway.fresh()
        for name in "abc":
            assert (await post(http, gateway, {**CHAT, "model": name}))[0] == (404 if name == "a" else 200)
        assert await _address(fleet, third) != _host(replica.row.base_url)
        assert [len(set(seen)) for seen in machines.seen.values()] == [1, 1, 1]


async def _stays(fleet: Fleet, replica_id: str, ask: Callable) -> None:
    """Ask for a while, and wake its run each time: its machine is there as long as the gateway sends to it."""
    end = asyncio.get_running_loop().time() + HELD_SECONDS
    while asyncio.get_running_loop().time() < end:
        await fleet.tell("replica", replica_id)
        assert (await ask())[0] == 200, "its machine went while it was in sight"


async def test_a_gateway_that_died_is_not_waited_for_long(fleet: Fleet, database_url: str, monkeypatch) -> None:
    """It says nothing more; the addresses of those that went rest meanwhile, and come back after that."""
    monkeypatch.setattr("controlplane.resources.replica.program.LIVES_SECONDS", 1.0)

    async def deaf(self: Keeper, connection) -> None:
        await asyncio.Event().wait()

    async with at_work(fleet, database_url) as (_, gateway):
        first = await create(fleet, "a", route="a")
        (replica,) = (await until_status(fleet, first, "ready")).replicas
        await gateway.fresh()
        monkeypatch.setattr(Keeper, "_look", deaf)
        await change(fleet, first, endpoints.remove)

        async def is_gone() -> bool:
            return await shown(fleet, first) is None

        await fleet.until(is_gone, "gone", 30)
        assert await _address(fleet, await create(fleet, "b", route="b")) != _host(replica.row.base_url)
        async with fleet.database.session() as session:
            await session.execute(update(RestingAddress).values(since=RestingAddress.since - REST))
        assert await _address(fleet, await create(fleet, "c", route="c")) == _host(replica.row.base_url)


async def _address(fleet: Fleet, endpoint_id: str) -> str:
    """That of the endpoint's replica."""
    query = select(Nic.ipv4).join(Vm, Vm.id == Nic.owner_id).join(Replica, Replica.vm_id == Vm.id)
    async with fleet.database.session() as session:
        return str((await session.scalars(query.where(Replica.endpoint_id == endpoint_id))).one())


def _host(base_url: str | None) -> str:
    assert base_url
    return base_url.removeprefix("http://").removesuffix(":8000")
