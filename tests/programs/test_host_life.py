"""Hosts under trial: every step twice, crashed, robbed, destroyed anywhere; then nothing is left on the host."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from pydantic import SecretStr
from sqlalchemy import func, select

from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.reconcile import Reconciler, keep_runs
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.world import World
from controlplane.models.host import Host
from controlplane.models.host_preflight import HostPreflight
from controlplane.remote.fake import FakeLinks
from controlplane.remote.link import AgentError
from controlplane.remote.login import LoginRefused, Ran, Target
from controlplane.resources.host import service
from controlplane.resources.host.keys import new_key
from controlplane.resources.host.program import HostPreflightProgram, HostProgram
from controlplane.resources.host.reconcile import HostPreflightsReconciler
from controlplane.resources.host.schemas import HostCreate, PreflightCreate
from hostagent.protocol import codec
from hostagent.protocol.enrol import Change, ChangeLine, Check, PreflightReport
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import Cursor, HostObserved
from tests.fakehost import fake_facts

FINGERPRINT = "SHA256:" + "A" * 43
CHANGES = tuple(
    Change(kind=kind, subject=subject) for kind, subject in (("user", "bedplate"), ("file", "/opt/agent"), ("unit", "a"))
)


@dataclass
class Server:
    """A machine as an operator's login and the agent's own link see it. `present` is what enrolment left on it."""

    links: FakeLinks
    host_id: str = ""
    present: set[tuple[str, str]] = field(default_factory=set)
    is_closed: bool = False
    is_slow_to_leave: bool = False
    boot: int = 1

    @asynccontextmanager
    async def login(self, target: Target) -> AsyncIterator[Server]:
        if self.is_closed:
            raise LoginRefused("not with this key")
        self.host_id = target.host_id
        yield self

    async def run(self, argv: list[str], stdin: bytes, *, deadline_seconds: float) -> Ran:
        del argv, deadline_seconds
        head = json.loads(stdin.split(b"\n", 1)[0])
        await asyncio.sleep(0)
        match head["arguments"]:
            case ["preflight", *_]:
                checks = (Check(name="root", result="ok", why="runs as root"),)
                report = PreflightReport(is_fit=True, checks=checks, facts=fake_facts("h", cpus=4, memory_bytes=8 << 30))
                return Ran(exit_code=0, stdout=json.dumps(codec.encode(report)).encode(), stderr=b"")
            case ["install", "--dry-run", *_]:
                return self._lines(CHANGES, "planned")
            case ["install", *_]:
                missing = [change for change in CHANGES if (change.kind, change.subject) not in self.present]
                self.present |= {(change.kind, change.subject) for change in missing}
                self.links.add(self.host_id, self.answer)
                self.links.mend(self.host_id)
                return self._lines(missing, "done")
            case ["uninstall"]:
                self.leave()
                return self._lines((), "done")
            case other:
                raise AssertionError(other)

    def _lines(self, changes: Sequence[Change], state: Any) -> Ran:
        lines = [json.dumps(codec.encode(ChangeLine(change=change, state=state))) for change in changes]
        return Ran(exit_code=0, stdout="\n".join(lines).encode(), stderr=b"")

    def leave(self) -> None:
        self.present.clear()
        self.links.lock_out(self.host_id)

    async def answer(self, request: Request) -> Answer:
        boot = f"boot-{self.boot}"
        match request.verb:
            case "facts.observe":
                return Answer(
                    id=request.id, body=codec.encode(replace(fake_facts("h", cpus=4, memory_bytes=8 << 30), boot_id=boot))
                )
            case "host.observe":
                seen = HostObserved(objects=(), boot_id=boot, agent_version="v", cursor=Cursor())
                return Answer(id=request.id, body=codec.encode(seen))
            case "host.reboot":
                self.boot += request.body["boot_id"] == boot
                return Answer(id=request.id)
            case "host.uninstall":
                if self.is_slow_to_leave:
                    self.links.cut(self.host_id, "the agent is not running")
                else:
                    self.leave()
                return Answer(id=request.id)
            case verb:
                return Answer(id=request.id, error=AgentError("verb.unknown", verb, retryable=False))


@pytest.fixture
def links() -> FakeLinks:
    return FakeLinks()


@pytest.fixture
def server(links: FakeLinks, monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server(links)
    for program in (HostProgram, HostPreflightProgram):
        monkeypatch.setattr(program, "logins", server.login)
    return server


def body(number: int) -> HostCreate:
    return HostCreate(name=f"h{number}", address=f"h{number}.test", host_key_fingerprint=FINGERPRINT, location="here")


async def test_every_step_of_a_hosts_life_may_be_cut(world: World[Any], links: FakeLinks, server: Server) -> None:
    async def make(world: World[Any], number: int) -> str:
        async with world.database.session() as session:
            host = await service.add(session, world.sealer, body(number))
            return host.id

    async def leftovers(world: World[Any], subject: str) -> list[str]:
        async with world.database.session() as session:
            rows = await session.scalar(select(func.count()).select_from(Host).where(Host.id == subject))
        return [*map(str, server.present), *(["the row"] if rows else [])]

    scenario = Scenario(registry=Registry([HostProgram]), program="host", make=make, leftovers=leftovers)
    assert await Harness(replace(world, hosts=links), scenario).run() > 10


async def test_every_step_of_a_preflight_may_be_cut(world: World[Any], links: FakeLinks, server: Server) -> None:
    async def make(world: World[Any], number: int) -> str:
        async with world.database.session() as session:
            wanted = PreflightCreate(address=f"h{number}.test", host_key_fingerprint=FINGERPRINT)
            return (await service.preflight(session, world.sealer, wanted)).id

    async def leftovers(world: World[Any], subject: str) -> list[str]:
        async with world.database.session() as session:
            rows = await session.scalar(select(func.count()).select_from(HostPreflight).where(HostPreflight.id == subject))
        return [*map(str, server.present), *(["the row"] if rows else [])]

    scenario = Scenario(registry=Registry([HostPreflightProgram]), program="host_preflight", make=make, leftovers=leftovers)
    assert await Harness(replace(world, hosts=links), scenario).run() > 5


async def test_a_host_that_is_only_silent_is_not_taken_off_yet(world: World[Any], links: FakeLinks, server: Server) -> None:
    world = replace(world, hosts=links)
    async with world.database.session() as session:
        host_id = (await service.add(session, world.sealer, body(1))).id
    async with Runner(world=world, registry=Registry([HostProgram])) as runner:
        run_id = await run_of(world, "host", host_id)
        await runner.advance(run_id)
        server.is_slow_to_leave = True
        async with world.database.session() as session:
            await service.remove(session, world.clock, await session.get_one(Host, host_id), is_forgotten=False)
        for _ in range(3):
            await let_wake(world, run_id)
            await runner.advance(run_id)
        async with world.database.session() as session:
            assert await session.get(Host, host_id) is not None, "its agent is silent, its key may still be there"
        server.leave()
        await let_wake(world, run_id)
        await runner.advance(run_id)
        async with world.database.session() as session:
            assert await session.get(Host, host_id) is None


async def test_a_preflight_that_failed_keeps_no_identity(world: World[Any], links: FakeLinks, server: Server) -> None:
    world = replace(world, hosts=links)
    server.is_closed = True
    async with world.database.session() as session:
        identity = new_key("operator")[1].decode()
        wanted = PreflightCreate(address="h.test", host_key_fingerprint=FINGERPRINT, identity=SecretStr(identity))
        row_id = (await service.preflight(session, world.sealer, wanted)).id
    async with Runner(world=world, registry=Registry([HostPreflightProgram])) as runner:
        await runner.advance(await run_of(world, "host_preflight", row_id))
        async with world.database.session() as session:
            row = await session.get_one(HostPreflight, row_id)
            assert row.identity_sealed is None
            row.created_at = func.now() - timedelta(days=3)
        await advance_all(world, runner, HostPreflightsReconciler)
        await runner.advance(await run_of(world, "host_preflight", row_id))
        async with world.database.session() as session:
            assert await session.get(HostPreflight, row_id) is None, "also a parked one goes in the end"
        assert await open_incidents(world) == []


@pytest.mark.parametrize("by", ["preflight", "add"])
async def test_a_failed_look_is_forgotten_when_the_place_is_tried_anew(world, links, server: Server, by: str) -> None:
    world = replace(world, hosts=links)
    server.is_closed = True
    async with world.database.session() as session:
        wanted = PreflightCreate(address="h1.test", host_key_fingerprint=FINGERPRINT)
        row_id = (await service.preflight(session, world.sealer, wanted)).id
        other_id = (await service.preflight(session, world.sealer, wanted.model_copy(update={"address": "h9.test"}))).id
    async with Runner(world=world, registry=Registry([HostPreflightProgram])) as runner:
        runs = {row: await run_of(world, "host_preflight", row) for row in (row_id, other_id)}
        for run_id in runs.values():
            await runner.advance(run_id)
        assert [subject for subject, _ in await open_incidents(world)] == sorted([row_id, other_id])
        detail = dict(await open_incidents(world))[row_id]
        assert "h1.test" in detail
        assert "host_preflight" in detail
        async with world.database.session() as session:
            if by == "preflight":
                await service.preflight(session, world.sealer, wanted)
            else:
                await service.add(session, world.sealer, body(1))
        for run_id in runs.values():
            await runner.advance(run_id)
        assert [subject for subject, _ in await open_incidents(world)] == [other_id]


async def open_incidents(world: World[Any]) -> list[tuple[str, str]]:
    rows = await world.database.pool.fetch("SELECT subject, detail FROM incident WHERE resolved_at IS NULL ORDER BY subject")
    return [(row[0], row[1]) for row in rows]


async def advance_all(world: World[Any], runner: Runner, reconciler: type[Reconciler[Any, Any]]) -> None:
    """Run a reconciler's look once, as a worker of its own does."""
    await keep_runs(world, reconciler)
    async with Runner(world=world, registry=Registry([reconciler])) as other:
        await other.advance(await run_of(world, reconciler.name, "all"))


async def run_of(world: World[Any], program: str, subject: str) -> str:
    query = "SELECT id FROM run WHERE program = $1 AND subject = $2 AND finished_at IS NULL"
    return await world.database.pool.fetchval(query, program, subject)


async def let_wake(world: World[Any], run_id: str) -> None:
    await world.database.pool.execute("UPDATE run SET wake_at = now(), not_before = now() WHERE id = $1", run_id)
