"""The watch with a real database, a real sshd and a real agent: events become signals, links go up and down, streams pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from sqlalchemy import func

from controlplane.core import json, ticket
from controlplane.core.clock import ManualClock, SystemClock
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import Sealer
from controlplane.kernel import service as kernel
from controlplane.kernel.database import Database
from controlplane.kernel.publish import RecordingPublisher
from controlplane.models.host import Host
from controlplane.remote.access import Access, RowDirectory, key_context
from controlplane.remote.ssh import SshLinks
from controlplane.watch.deliver import Delivery
from controlplane.watch.host import HOST_UP, HostWatcher
from controlplane.watch.leases import Leases
from controlplane.watch.main import Watch
from controlplane.watch.relay import Relay, own_socket
from tests.agent.conftest import DEADLINE_SECONDS, Served
from tests.agent.sshd import Sshd
from tests.agent.test_serve import bare_vm

pytestmark = pytest.mark.caps("sshd")
SEALER = Sealer(bytes(range(32)))


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = await Database.open(database_url, pool_size=5, publisher=RecordingPublisher())
    yield database
    await database.close()


class OwnUser(RowDirectory):
    """The test's sshd lets in the test's own user, not the product's."""

    def __init__(self, database: Database, user: str) -> None:
        super().__init__(database.pool, SEALER)
        self.user = user

    async def access(self, host_id: str) -> Access:
        from dataclasses import replace

        return replace(await super().access(host_id), user=self.user)


async def add_host(database: Database, access: Access) -> str:
    host_id = new_id(Kind.HOST)
    async with database.session() as session:
        session.add(
            Host(
                id=host_id,
                name=host_id.replace("_", "-"),
                state="ready",
                address=access.address,
                port=access.port,
                host_key_fingerprint=access.fingerprint,
                ssh_key_sealed=SEALER.seal(access.private_key, context=key_context(host_id)),
                **({"ssh_public_key": "ssh-ed25519 AAAA"} if hasattr(Host, "ssh_public_key") else {}),
                facts={},
                facts_at=func.now(),
            )
        )
    return host_id


@pytest.fixture
async def links(database: Database, sshd: Sshd) -> AsyncIterator[SshLinks]:
    made = SshLinks(OwnUser(database, sshd.access.user))
    yield made
    await made.close()


@pytest.fixture
async def host_id(database: Database, sshd: Sshd) -> str:
    return await add_host(database, sshd.access)


@pytest.fixture
async def watch(database: Database, links: SshLinks, host_id: str) -> AsyncIterator[Watch]:
    delivery = Delivery(database)
    watch = Watch(Leases(database, "one"), links, lambda found: HostWatcher(found, links, delivery, lost_after_seconds=0.5))
    running = asyncio.create_task(watch.run())
    yield watch
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await condition():
            await asyncio.sleep(0.05)


async def link_of(database: Database, host_id: str) -> str:
    return await database.pool.fetchval("SELECT link FROM host WHERE id = $1", host_id)


async def is_up(database: Database, host_id: str) -> bool:
    return await link_of(database, host_id) == "up"


async def signals(database: Database, subject: str) -> list[dict]:
    rows = await database.pool.fetch(
        "SELECT s.kind, s.body FROM signal s JOIN run r ON r.id = s.run_id WHERE r.subject = $1 ORDER BY s.id", subject
    )
    return [{"signal": row["kind"], **json.loads(row["body"])} for row in rows]


async def test_an_event_on_the_host_is_a_signal(watch: Watch, database: Database, links: SshLinks, host_id: str):
    vm_id = new_id(Kind.VM)
    await kernel.start(database.pool, "vm", vm_id)
    await eventually(lambda: is_up(database, host_id))
    assert HOST_UP.labels(host_id)._value.get() == 1
    await links.ensure(host_id, bare_vm(vm_id))

    async def told() -> bool:
        return any(s.get("event") == "vm.changed" and s["state"] == "running" for s in await signals(database, vm_id))

    await eventually(told)
    cursor = await database.pool.fetchrow("SELECT log, seq FROM host_cursor WHERE host_id = $1", host_id)
    assert cursor["seq"] > 0


async def test_an_agent_that_goes_is_lost_and_its_return_is_looked_at(
    watch: Watch, database: Database, links: SshLinks, host_id: str, served: Served
):
    vm_id = new_id(Kind.VM)
    await kernel.start(database.pool, "vm", vm_id)
    await eventually(lambda: is_up(database, host_id))
    await links.ensure(host_id, bare_vm(vm_id))
    await served.kill()

    async def lost() -> bool:
        return await link_of(database, host_id) == "lost"

    await eventually(lost)
    assert HOST_UP.labels(host_id)._value.get() == 0
    before = len(await signals(database, vm_id))
    await served.start()
    await eventually(lambda: is_up(database, host_id))

    async def looked() -> bool:
        return any(s.get("event") == "observed" for s in (await signals(database, vm_id))[before:])

    await eventually(looked)
    kinds = [row["kind"] for row in await database.pool.fetch("SELECT kind FROM event WHERE subject_id = $1", host_id)]
    assert kinds.count("host.link_lost") == 1
    assert kinds.count("host.link_up") == 2


async def test_what_nobody_asked_for_is_an_incident(
    watch: Watch, database: Database, links: SshLinks, host_id: str, served: Served
):
    await eventually(lambda: is_up(database, host_id))
    stray = served.paths.wanted / "vm" / "vm_stray.json"
    await served.kill()
    stray.parent.mkdir(parents=True, exist_ok=True)
    stray.write_text("{}")
    await served.start()

    async def opened() -> bool:
        query = "SELECT detail FROM incident WHERE code = 'host.broken_document' AND subject = $1"
        return "vm vm_stray" in (await database.pool.fetchval(query, host_id) or "")

    await eventually(opened)


async def test_another_host_key_is_an_incident(database: Database, links: SshLinks, sshd: Sshd, host_id: str):
    await database.pool.execute("UPDATE host SET host_key_fingerprint = 'SHA256:other' WHERE id = $1", host_id)
    watcher = asyncio.create_task(HostWatcher(host_id, links, Delivery(database), lost_after_seconds=0).run())
    query = "SELECT detail FROM incident WHERE code = 'host.key_changed' AND subject = $1 AND resolved_at IS NULL"

    async def opened() -> bool:
        return sshd.host_key.get_fingerprint() in (await database.pool.fetchval(query, host_id) or "")

    await eventually(opened)
    good = sshd.access.fingerprint
    await database.pool.execute("UPDATE host SET host_key_fingerprint = $2 WHERE id = $1", host_id, good)

    async def resolved() -> bool:
        return await database.pool.fetchval(query, host_id) is None

    await eventually(resolved)
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)


async def test_two_watches_share_and_take_over(database: Database):
    one, two = Leases(database, "one"), Leases(database, "two")
    await one.tick()
    assert len(one.held) == 64
    await two.tick()
    await one.tick()
    await two.tick()
    assert len(one.held) == len(two.held) == 32
    assert not one.held & two.held
    await one.leave()
    await two.tick()
    assert len(two.held) == 64


async def open_relay(links: SshLinks, path: Path, clock: ManualClock | SystemClock) -> asyncio.Server:
    return await Relay(links, SEALER, clock).listen(path)


async def say(path: Path, text: str) -> tuple[dict, asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(json.dumps({"ticket": text}) + b"\n")
    async with asyncio.timeout(DEADLINE_SECONDS):
        return json.loads(await reader.readline()), reader, writer


async def test_a_log_is_relayed_once_by_ticket(links: SshLinks, host_id: str, served: Served, tmp_path: Path):
    await links.ensure(host_id, bare_vm())
    served.paths.vm_log("vm_1").parent.mkdir(parents=True, exist_ok=True)
    served.paths.vm_log("vm_1").write_bytes(b"the guest says hello\n")
    path, clock = served.root / "w.sock", SystemClock()
    server = await open_relay(links, path, clock)
    wanted = ticket.StreamTicket(user_id="user_1", host_id=host_id, kind="log", object_id="vm_1", tail_bytes=6)
    text = ticket.issue(SEALER, clock, wanted)
    answer, reader, writer = await say(path, text)
    assert answer == {"ok": True}
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await reader.read() == b"hello\n"
    writer.close()
    again, _, writer = await say(path, text)
    assert again["code"] == "stream.ticket_refused"
    writer.close()
    unknown = ticket.issue(SEALER, clock, ticket.StreamTicket(user_id="u", host_id=host_id, kind="log", object_id="vm_2"))
    answer, _, writer = await say(path, unknown)
    assert answer["code"] == "vm.unknown"
    writer.close()
    server.close()


async def test_watches_have_sockets_of_their_own_and_dead_ones_go(links: SshLinks, tmp_path: Path):
    shared = tmp_path / "watch.sock"
    first, clock = own_socket(shared), SystemClock()
    one = await open_relay(links, first, clock)
    second = own_socket(shared)
    two = await open_relay(links, second, clock)
    assert first != second
    for path in (first, second):
        answer, _, writer = await say(path, "nonsense")
        assert answer["code"] == "stream.ticket_refused"
        writer.close()
    one.close()
    third = own_socket(shared)
    assert {path.name for path in tmp_path.glob("watch*")} == {second.name}, "the dead one's socket is gone"
    assert third not in (first, second)
    two.close()


async def test_forged_and_old_tickets_are_refused(links: SshLinks, served: Served):
    path, clock = served.root / "w.sock", ManualClock()
    server = await open_relay(links, path, clock)
    wanted = ticket.StreamTicket(user_id="u", host_id="host_1", kind="log", object_id="vm_1")
    old = ticket.issue(SEALER, clock, wanted)
    clock.advance(61)
    for text in ("", "nonsense", ticket.issue(Sealer(bytes(32)), clock, wanted), old):
        answer, _, writer = await say(path, text)
        assert answer["code"] == "stream.ticket_refused"
        writer.close()
    server.close()
