"""Log, console and ports of VMs through the API: relayed by the watch's socket, and only for who may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import uvicorn
from sqlalchemy import text
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from controlplane.core.clock import SystemClock
from controlplane.core.sealing import Sealer
from controlplane.core.ticket import StreamTicket, redeem
from controlplane.kernel.service import shard_of
from controlplane.listener import bind
from tests.api.fleet import add_host, lay_ground

VMS = "/v1/projects/ours/vms"
BODY = {"name": "web", "image": "debian", "network": "net"}


@dataclass
class FakeWatch:
    """Plays the watch: says `hello`, then what it hears in capitals. `refusal` is answered instead, when there is one."""

    tickets: list[StreamTicket] = field(default_factory=list)
    refusal: dict[str, object] | None = None
    keeps_logs_open: bool = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        self.tickets.append(redeem(Sealer(bytes(32)), SystemClock(), hello["ticket"]))
        writer.write(json.dumps(self.refusal or {"ok": True}).encode() + b"\n")
        if self.refusal is None:
            writer.write(b"hello\n")
            await writer.drain()
            if self.keeps_logs_open or self.tickets[-1].kind != "log":
                while data := await reader.read(100):
                    writer.write(data.upper())
                    await writer.drain()
        writer.close()


@pytest.fixture
async def watch(api, settings) -> AsyncIterator[FakeWatch]:
    fake = FakeWatch()
    listening = await asyncio.start_unix_server(fake.accept, settings.state_dir / "watch.sock")
    yield fake
    listening.close()


@pytest.fixture
async def vm(api, member) -> dict[str, object]:
    await lay_ground(api.database.sessionmaker)
    await add_host(api.database.sessionmaker)
    return (await member.post(VMS, json=BODY)).json()


@pytest.fixture
async def url(api) -> AsyncIterator[str]:
    """The API on a port: WebSockets need one."""
    listener = bind("127.0.0.1:0")
    one = uvicorn.Server(uvicorn.Config(api.app, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
    task = asyncio.create_task(one._serve(sockets=[listener]))
    async with asyncio.timeout(20):
        while not one.started:
            await asyncio.sleep(0.01)
    yield f"ws://127.0.0.1:{listener.getsockname()[1]}"
    one.should_exit = True
    await task


async def test_the_log_is_streamed(member, vm, watch):
    answer = await member.get(f"{VMS}/web/log", params={"tail_bytes": 100})
    assert (answer.status_code, answer.text) == (200, "hello\n")
    (ticket,) = watch.tickets
    assert (ticket.kind, ticket.object_id, ticket.tail_bytes) == ("log", vm["id"], 100)


async def test_of_several_watches_the_one_that_holds_the_host_is_asked(api, member, vm, tmp_path):
    """And another one while that one is gone: it has its own way to the host."""
    fakes = {name: FakeWatch() for name in ("one", "two")}
    listening = {name: await asyncio.start_unix_server(fake.accept, tmp_path / name) for name, fake in fakes.items()}
    async with api.database.sessionmaker.begin() as session:
        host_id = (await session.execute(text("SELECT host_id FROM vm"))).scalar_one()
        for name in fakes:
            values = {"name": name, "socket": str(tmp_path / name)}
            insert = "INSERT INTO watch_presence (watch, present_until, socket) VALUES (:name, now() + interval '1 h', :socket)"
            await session.execute(text(insert), values)
        lease = "INSERT INTO watch_shard (id, watch, lease_until) VALUES (:id, 'two', now() + interval '1 h')"
        await session.execute(text(lease), {"id": shard_of(host_id)})
    assert (await member.get(f"{VMS}/web/log")).text == "hello\n"
    assert [len(fake.tickets) for fake in fakes.values()] == [0, 1]
    listening["two"].close()
    assert (await member.get(f"{VMS}/web/log")).text == "hello\n"
    assert [len(fake.tickets) for fake in fakes.values()] == [1, 1]
    listening["one"].close()


async def test_no_watch_and_a_refusal_are_said(member, vm, settings):
    away = await member.get(f"{VMS}/web/log")
    assert (away.status_code, away.json()["code"]) == (503, "stream.unavailable")
    fake = FakeWatch(refusal={"ok": False, "code": "vm.stopped", "message": "the machine does not run"})
    listening = await asyncio.start_unix_server(fake.accept, settings.state_dir / "watch.sock")
    refused = await member.get(f"{VMS}/web/log")
    assert (refused.status_code, refused.json()["code"]) == (409, "stream.refused")
    assert "does not run" in refused.json()["detail"]
    listening.close()


async def test_console_and_port_both_ways(api, vm, watch, url):
    headers = {"authorization": f"Bearer {api.member_token}"}
    for path, kind, number in (("console", "console", 0), ("port/22", "tcp", 22)):
        async with connect(f"{url}{VMS}/web/{path}", additional_headers=headers) as socket:
            assert await socket.recv() == b"hello\n"
            await socket.send(b"who is there")
            assert await socket.recv() == b"WHO IS THERE"
        assert (watch.tickets[-1].kind, watch.tickets[-1].port) == (kind, number)
    async with api.database.sessionmaker() as session:
        actions = list(await session.scalars(text("SELECT action FROM audit WHERE action <> 'vm.create' ORDER BY id")))
    assert actions == ["vm.console", "vm.connect"]


async def test_a_browser_sends_its_token_as_a_subprotocol(api, vm, watch, url):
    async with connect(f"{url}{VMS}/web/console", subprotocols=["bedplate", f"bearer.{api.member_token}"]) as socket:
        assert socket.subprotocol == "bedplate"
        assert await socket.recv() == b"hello\n"


async def test_who_may_not_is_refused_before_the_upgrade(api, vm, watch, url):
    for token, status in ((None, 401), ("bp_wrong", 401), (api.stranger_token, 404)):
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{url}{VMS}/web/console", additional_headers=headers)
        assert refused.value.response.status_code == status
        assert refused.value.response.headers["content-type"] == "application/problem+json"
    assert watch.tickets == []
