"""What a run does from start to end: steps, waits, memo, failure, parking, destroy, deadlines, children."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from controlplane import kernel
from controlplane.kernel import incident
from controlplane.kernel.database import Database
from controlplane.kernel.outcome import LeaseLost
from controlplane.kernel.program import Memo, Outcome, Program, Terminal, done, goto, step, wait
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.world import World
from controlplane.models.incident import Incident

LOG: dict[str, list[str]] = {}
SOON = timedelta(minutes=5)


class StoryMemo(Memo):
    pages: int = 0


class StoryProgram(Program[str]):
    """Two pages, then it waits for signals; `stop` ends it."""

    memo: StoryMemo

    @step(within=SOON)
    async def first(self) -> Outcome:
        self.memo.pages += 1
        LOG.setdefault(self.subject, []).append("first")
        return goto(self.second)

    @step(within=SOON)
    async def second(self) -> Outcome:
        async with self.tx() as tx:
            await tx.conn.execute("SELECT 1")
            self.memo.pages += 1
            LOG[self.subject].append(f"second {self.memo.pages}")
            return tx.goto(self.rest)

    @step(within=None)
    async def rest(self) -> Outcome:
        LOG[self.subject].extend(f"told {told.kind} {told.body.get('n', '')}".strip() for told in self.signals)
        if self.has_signal("stop"):
            return done({"pages": self.memo.pages})
        return wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        LOG.setdefault(self.subject, []).append("destroy")
        return done()


class BrokenProgram(Program[str]):
    """Fails until it is told how to go on."""

    @step(within=SOON)
    async def only(self) -> Outcome:
        LOG.setdefault(self.subject, []).append(f"try {self.attempt}")
        if self.has_signal("heal"):
            return done()
        if self.subject.startswith("terminal"):
            raise Terminal("toy.broken", "the spring is broken; replace it")
        raise OSError("the wire is cut")

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        LOG.setdefault(self.subject, []).append("destroy")
        return done()


class ParentProgram(Program[str]):
    @step(within=SOON)
    async def spawn_children(self) -> Outcome:
        async with self.tx():
            self.spawn(StoryProgram, f"{self.subject}-a", f"{self.subject}-b")
            self.spawn("story", f"{self.subject}-a")
        return goto(self.wait_for_them)

    @step(within=SOON)
    async def wait_for_them(self) -> Outcome:
        if not await self.children_ready():
            return wait()
        self.signal(StoryProgram, f"{self.subject}-a", "stop")
        self.destroy_child(StoryProgram, f"{self.subject}-b")
        return goto(self.finish)

    @step(within=SOON)
    async def finish(self) -> Outcome:
        return done() if await self.children_gone() else wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


@pytest.fixture
async def runner(world: World[Any]):
    LOG.clear()
    async with Runner(world=world, registry=Registry([StoryProgram, BrokenProgram, ParentProgram])) as runner:
        yield runner


async def begin(database: Database, program: str, subject: str) -> str:
    async with database.session() as session:
        return await kernel.start(session, program, subject)


async def row(database: Database, run_id: str) -> asyncpg.Record:
    found = await database.pool.fetchrow("SELECT * FROM run WHERE id = $1", run_id)
    assert found is not None
    return found


async def make_due(database: Database, run_id: str) -> None:
    await database.pool.execute(
        "UPDATE run SET wake_at = now(), not_before = now() WHERE id = $1 AND finished_at IS NULL", run_id
    )


async def test_a_story_from_start_to_end(database: Database, runner: Runner) -> None:
    run_id = await begin(database, "story", "s1")
    assert database.publisher.told[0][0] == run_id
    assert await runner.advance(run_id)
    run = await row(database, run_id)
    assert (run["step"], run["lease"], run["wake_at"], run["attempt"], run["deadline_at"]) == ("rest", None, None, 0, None)
    assert run["ready_at"] is not None
    assert not await runner.advance(run_id)

    async with database.session() as session:
        assert await kernel.signal(session, program="story", subject="s1", kind="say", body={"n": 1}) == run_id
        await kernel.signal(session, program="story", subject="s1", kind="say", body={"n": 2})
        await kernel.signal(session, program="story", subject="s1", kind="stop")
    assert await runner.advance(run_id)
    run = await row(database, run_id)
    assert run["finished_at"] is not None
    assert run["result"] == '{"pages": 2}'
    assert LOG["s1"] == ["first", "second 2", "told say 1", "told say 2", "told stop"]
    assert await database.pool.fetchval("SELECT count(*) FROM signal") == 0
    async with database.session() as session:
        assert await kernel.signal(session, "story", "s1", "say") is None
        assert await kernel.destroy(session, "story", "s1") is None
        assert await kernel.start(session, "story", "s1") != run_id


async def test_start_is_idempotent_and_wakes(database: Database, runner: Runner) -> None:
    first = await begin(database, "story", "s2")
    await runner.advance(first)
    assert await begin(database, "story", "s2") == first
    assert await runner.advance(first)
    assert LOG["s2"][-1] == "told start"


async def test_a_rolled_back_start_is_nothing(database: Database) -> None:
    with pytest.raises(RuntimeError):  # noqa: PT012
        async with database.session() as session:
            await kernel.start(session, "story", "s3")
            raise RuntimeError
    assert await database.pool.fetchval("SELECT count(*) FROM run") == 0
    assert database.publisher.told == []


async def test_failing_step_backs_off_and_tells_the_operator(database: Database, runner: Runner) -> None:
    run_id = await begin(database, "broken", "b1")
    for attempt in (1, 2, 3, 4):
        assert await runner.advance(run_id)
        run = await row(database, run_id)
        assert (run["attempt"], run["last_error"], run["lease"]) == (attempt, "the wire is cut", None)
        assert timedelta() < run["not_before"] - run["wake_at"] + timedelta(minutes=2)
        async with database.session() as session:
            await kernel.signal(session, "broken", "b1", "storm")
        assert not await runner.advance(run_id), "a signal must not defeat the back-off"
        await make_due(database, run_id)
    opened = await database.pool.fetchrow("SELECT * FROM incident")
    assert (opened["code"], opened["count"], opened["run_id"]) == ("run.step_failing", 2, run_id)
    assert "the wire is cut" in opened["detail"]
    async with database.session() as session:
        await kernel.signal(session, "broken", "b1", "heal")
    assert await runner.advance(run_id)
    assert (await row(database, run_id))["finished_at"] is not None
    assert await database.pool.fetchval("SELECT resolved_by FROM incident") == "kernel"


async def test_terminal_parks_until_resume(database: Database, runner: Runner) -> None:
    run_id = await begin(database, "broken", "terminal-1")
    assert await runner.advance(run_id)
    run = await row(database, run_id)
    assert (run["parked_code"], run["wake_at"]) == ("toy.broken", None)
    assert "replace it" in await database.pool.fetchval("SELECT detail FROM incident WHERE code = 'toy.broken'")
    async with database.session() as session:
        await kernel.signal(session, "broken", "terminal-1", "heal")
    assert not await runner.advance(run_id), "signals wait while a run is parked"
    assert await runner.sweep(range(64)) == 0
    async with database.session() as session:
        assert await kernel.resume(session, "broken", "terminal-1")
    assert await runner.advance(run_id)
    assert (await row(database, run_id))["finished_at"] is not None
    assert await database.pool.fetchval("SELECT count(*) FROM incident WHERE resolved_at IS NULL") == 0


async def test_destroy_ends_any_run(database: Database, runner: Runner) -> None:
    parked = await begin(database, "broken", "terminal-2")
    await runner.advance(parked)
    fresh = await begin(database, "story", "fresh")
    resting = await begin(database, "story", "resting")
    await runner.advance(resting)
    for program, subject in (("broken", "terminal-2"), ("story", "fresh"), ("story", "resting")):
        async with database.session() as session:
            await kernel.destroy(session, program=program, subject=subject)
    for run_id in (parked, fresh, resting):
        assert await runner.advance(run_id)
        run = await row(database, run_id)
        assert run["finished_at"] is not None
        assert run["destroy_at"] is not None
        assert run["step"] == "destroy"
    assert LOG["fresh"] == ["destroy"]


async def test_children(database: Database, runner: Runner) -> None:
    parent = await begin(database, "parent", "p")
    await runner.advance(parent)
    children = await database.pool.fetch("SELECT id, subject FROM run WHERE program = 'story' ORDER BY subject")
    assert [child["subject"] for child in children] == ["p-a", "p-b"]
    assert not await runner.advance(parent)
    await runner.advance(children[0]["id"])
    assert await runner.advance(parent), "the child's rest wakes the parent"
    assert (await row(database, parent))["step"] == "wait_for_them"
    await runner.advance(children[1]["id"])
    assert await runner.advance(parent)
    assert (await row(database, parent))["step"] == "finish"
    for child in children:
        assert await runner.advance(child["id"])
    assert await runner.advance(parent)
    assert (await row(database, parent))["finished_at"] is not None


class ReportProgram(Program[Incident]):
    """Works on its row through the ORM, in the transaction of the outcome."""

    @step(within=SOON)
    async def change(self) -> Outcome:
        async with self.tx() as tx:
            row = await tx.session.get(Incident, self.subject.id)
            assert row is not None
            row.detail += f", changed by try {self.attempt}"
            await kernel.start(tx.session, "story", "from-a-step")
            await tx.session.flush()
            assert row.detail == await tx.conn.fetchval("SELECT detail FROM incident WHERE id = $1", self.subject_id)
            if self.attempt == 1:
                raise OSError("the first try fails after its change")
            return tx.goto(self.rest)

    @step(within=None)
    async def rest(self) -> Outcome:
        return wait(seconds=3600)

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        async with self.tx() as tx:
            await tx.session.delete(self.subject)
        return done()


async def test_the_orm_and_the_outcome_share_a_transaction(database: Database, world: World[Any]) -> None:
    async with database.session() as session:
        subject = await incident.open_incident(session, "x.y", "host_1", "words")
        run_id = await kernel.start(session, "report", subject)
    async with Runner(world=world, registry=Registry([ReportProgram])) as runner:
        assert await runner.advance(run_id)
        words = "SELECT detail FROM incident WHERE id = $1"
        assert await database.pool.fetchval(words, subject) == "words"
        assert await database.pool.fetchval("SELECT count(*) FROM run WHERE program = 'story'") == 0
        await make_due(database, run_id)
        assert await runner.advance(run_id)
        assert await database.pool.fetchval(words, subject) == "words, changed by try 2"
        assert database.publisher.told[-1][0] == await database.pool.fetchval("SELECT id FROM run WHERE program = 'story'")
        assert (await row(database, run_id))["ready_at"] is not None
        async with database.session() as session:
            await kernel.destroy(session, "report", subject)
        assert await runner.advance(run_id)
        assert (await row(database, run_id))["finished_at"] is not None


async def test_a_subject_without_a_row_parks_or_is_destroyed_already(database: Database, world: World[Any]) -> None:
    run_id = await begin(database, "report", "inc_gone")
    async with Runner(world=world, registry=Registry([ReportProgram])) as runner:
        await runner.advance(run_id)
        assert (await row(database, run_id))["parked_code"] == "run.subject_gone"
        async with database.session() as session:
            await kernel.destroy(session, "report", "inc_gone")
        await runner.advance(run_id)
        assert (await row(database, run_id))["finished_at"] is not None


async def test_a_program_nobody_knows_waits_for_a_worker_that_does(
    database: Database, runner: Runner, world: World[Any]
) -> None:
    run_id = await begin(database, "report", "inc_gone")
    await runner.advance(run_id)
    assert (await row(database, run_id))["parked_at"] is None
    assert "no program named report" in await database.pool.fetchval("SELECT detail FROM incident")


async def test_incidents_of_subjects_count_and_close(database: Database) -> None:
    async with database.session() as session:
        first = await incident.open_incident(session, "host.object_unknown", "host_1", "vm_9 runs there, nobody wants it")
        assert await incident.open_incident(session, "host.object_unknown", "host_1", "still there") == first
        assert await incident.open_incident(session, "host.object_unknown", "host_2", "another") != first
        await incident.resolve_incident(session, "host.object_unknown", "host_1", by="ops")
        assert await incident.open_incident(session, "host.object_unknown", "host_1", "again") != first
    found = await database.pool.fetchrow("SELECT * FROM incident WHERE id = $1", first)
    assert (found["count"], found["detail"], found["resolved_by"]) == (2, "still there", "ops")


class BriefProgram(Program[str]):
    @step(within=SOON)
    async def only(self) -> Outcome:
        LOG.setdefault(self.subject, []).append("ran")
        return done()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class ClumsyProgram(Program[str]):
    """Spawns in a transaction of its own, and dies afterwards at the first try."""

    @step(within=SOON)
    async def spawn_it(self) -> Outcome:
        async with self.tx():
            self.spawn(BriefProgram, "brief")
        if self.attempt == 1:
            raise OSError("died after the spawn")
        return goto(self.spawn_again)

    @step(within=SOON)
    async def spawn_again(self) -> Outcome:
        if self.attempt == 1:
            self.spawn(BriefProgram, "brief")
        return wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


async def test_spawning_twice_is_once_even_when_the_child_has_ended(database: Database, world: World[Any]) -> None:
    LOG.clear()
    parent = await begin(database, "clumsy", "c")
    count = "SELECT count(*) FROM run WHERE program = 'brief'"
    async with Runner(world=world, registry=Registry([BriefProgram, ClumsyProgram])) as runner:
        await runner.advance(parent)
        await runner.advance(await database.pool.fetchval("SELECT id FROM run WHERE program = 'brief'"))
        assert LOG["brief"] == ["ran"]
        await make_due(database, parent)
        await runner.advance(parent)
        assert (await row(database, parent))["step"] == "spawn_again"
        assert await database.pool.fetchval(count) == 2, "only the later step may spawn it anew"


async def test_a_stale_lease_writes_nothing(database: Database, runner: Runner) -> None:
    from controlplane.kernel import sql
    from controlplane.kernel.work import Work

    run_id = await begin(database, "story", "stale")
    row_claimed = await database.pool.fetchrow(sql.CLAIM_BY_ID, run_id, 7, runner.registry.seconds_json)
    work = Work.of(row_claimed, database, runner.registry.seconds["story"])
    await database.pool.execute("UPDATE run SET lease = 99 WHERE id = $1", run_id)
    for outcome in (goto(StoryProgram.second), wait(), done()):
        with pytest.raises(LeaseLost):
            await work.write(outcome)
    with pytest.raises(LeaseLost):
        await work.park("x", "y")
    for tx in (work.tx, work.raw_tx):
        with pytest.raises(LeaseLost):
            async with tx():
                pytest.fail("the fence let a stale lease in")
