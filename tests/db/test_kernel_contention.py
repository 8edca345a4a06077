"""Many runners on few runs: nothing is lost, nothing deadlocks, no signal goes unheard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from controlplane import kernel
from controlplane.kernel import sql
from controlplane.kernel.database import Database
from controlplane.kernel.runner import Runner
from controlplane.kernel.shard import ShardKeeper
from controlplane.kernel.sweep import look_at_deadlines
from controlplane.kernel.world import World
from tests.db import kernel_toys as toys

ALL_SHARDS = range(64)
DEADLINE = 40.0


@pytest.fixture
async def table(database: Database) -> None:
    await toys.make_table(database.pool)


async def deadlocks(database: Database) -> int:
    await database.pool.execute("SELECT pg_stat_force_next_flush()")
    return await database.pool.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")


async def sweep_until(runners: list[Runner], database: Database, unfinished: int = 0) -> None:
    """Let every runner sweep everything, at its own pace, until so many runs are left."""

    async def work(runner: Runner) -> None:
        while True:
            await runner.sweep(ALL_SHARDS, 5)
            await asyncio.sleep(0.03)

    workers = [asyncio.create_task(work(runner)) for runner in runners]
    try:
        async with asyncio.timeout(DEADLINE):
            while await database.pool.fetchval("SELECT count(*) FROM run WHERE finished_at IS NULL") > unfinished:
                await asyncio.sleep(0.1)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


@pytest.fixture
async def runners(world: World[Any], table: None) -> AsyncIterator[list[Runner]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Runner(world=world, registry=toys.registry())) for _ in range(10)]


async def test_ten_workers_forty_runs_no_deadlock(database: Database, runners: list[Runner]) -> None:
    async with database.session() as session:
        for number in range(10):
            await kernel.start(session, "tree", f"t{number}")
    await sweep_until(runners, database)
    assert await database.pool.fetchval("SELECT count(*) FROM run") == 40
    exact = await database.pool.fetch("SELECT subject, step, count(*) AS n FROM effect WHERE is_exact GROUP BY 1, 2")
    assert len(exact) == 10 + 30 * 5
    assert {row["n"] for row in exact} == {1}
    assert await database.pool.fetchval("SELECT count(*) FROM effect WHERE NOT is_exact") >= 30
    assert await database.pool.fetchval("SELECT count(*) FROM incident") == 0
    assert await deadlocks(database) == 0


async def test_no_signal_is_lost_under_fire(database: Database, runners: list[Runner]) -> None:
    async with database.session() as session:
        for name in ("a", "b"):
            await kernel.start(session, "echo", name)

    async def shout(name: str, offset: int) -> None:
        for number in range(40):
            async with database.session() as session:
                assert await kernel.signal(session, "echo", name, "say", {"n": offset + number}) is not None

    shouting = asyncio.gather(*(shout(name, offset) for name in ("a", "b") for offset in (0, 100, 200)))
    sweeping = asyncio.create_task(sweep_until(runners, database, unfinished=-1))
    await asyncio.wait_for(shouting, DEADLINE)
    async with asyncio.timeout(DEADLINE):
        while await database.pool.fetchval("SELECT count(*) FROM signal"):
            await asyncio.sleep(0.05)
    sweeping.cancel()
    await asyncio.gather(sweeping, return_exceptions=True)
    heard = await database.pool.fetch("SELECT subject, step, count(*) AS n FROM effect GROUP BY 1, 2")
    assert {row["n"] for row in heard} == {1}
    assert len(heard) == 240


async def test_a_signal_is_heard_or_refused_never_dropped(database: Database, runners: list[Runner]) -> None:
    """Signals race with the end of a run: each is either seen before the end, or its sender is told that there is no run."""
    for number in range(12):
        subject = f"race{number}"
        async with database.session() as session:
            run_id = await kernel.start(session, "leaf", subject)

        async def shout(subject: str = subject) -> list[str | None]:
            answers = []
            for count in range(15):
                async with database.session() as session:
                    answers.append(await kernel.signal(session, "leaf", subject, "say", {"n": count}))
            return answers

        async def drive(run_id: str = run_id) -> None:
            async with asyncio.timeout(DEADLINE):
                while not await database.pool.fetchval("SELECT finished_at FROM run WHERE id = $1", run_id):
                    await runners[0].advance(run_id)

        answers, _ = await asyncio.gather(shout(), drive())
        left = await database.pool.fetchval("SELECT count(*) FROM signal WHERE run_id = $1", run_id)
        assert left == 0, f"{left} signals were accepted by a run that had ended ({answers})"


async def test_claims_exclude_each_other(database: Database, table: None) -> None:
    """Twenty claims of one run at the same time, by id and by shard: one gets it."""
    seconds = toys.registry().seconds_json
    for round_number in range(5):
        async with database.session() as session:
            run_id = await kernel.start(session, "leaf", f"c{round_number}")
        shard = await database.pool.fetchval("SELECT shard FROM run WHERE id = $1", run_id)
        claims = [database.pool.fetch(sql.CLAIM_BY_ID, run_id, 1000 + n, seconds) for n in range(10)]
        claims += [database.pool.fetch(sql.CLAIM_BY_SHARD, [shard], 2000 + n, seconds, 5) for n in range(10)]
        got = [row for rows in await asyncio.gather(*claims) for row in rows if row["id"] == run_id]
        assert len(got) == 1
        assert await database.pool.fetchval("SELECT attempt FROM run WHERE id = $1", run_id) == 1


async def test_a_dead_workers_run_is_due_again(database: Database, table: None) -> None:
    seconds = toys.registry().seconds_json
    async with database.session() as session:
        run_id = await kernel.start(session, "leaf", "dead")
    assert await database.pool.fetch(sql.CLAIM_BY_ID, run_id, 1, seconds)
    assert not await database.pool.fetch(sql.CLAIM_BY_SHARD, list(ALL_SHARDS), 2, seconds, 5)
    await database.pool.execute("UPDATE run SET lease_until = now() - interval '1 s', wake_at = now()")
    assert len(await database.pool.fetch(sql.CLAIM_BY_SHARD, list(ALL_SHARDS), 3, seconds, 5)) == 1
    assert await database.pool.fetchval("SELECT attempt FROM run WHERE id = $1", run_id) == 2


async def test_renewal_tells_what_was_lost_and_passes_over_locked_rows(database: Database, table: None) -> None:
    seconds = toys.registry().seconds_json
    async with database.session() as session:
        ids = [await kernel.start(session, "leaf", f"r{n}") for n in range(3)]
    for run_id in ids:
        await database.pool.fetch(sql.CLAIM_BY_ID, run_id, 7, seconds)
    await database.pool.execute("UPDATE run SET lease = 8 WHERE id = $1", ids[0])
    await database.pool.execute("UPDATE run SET lease_until = now() + interval '1 s'")
    async with database.pool.acquire() as other, other.transaction():
        await other.fetch(sql.FENCE, ids[1], 7)
        lost = await asyncio.wait_for(database.pool.fetch(sql.RENEW, ids, [7, 7, 7]), 5)
    assert [row[0] for row in lost] == [ids[0]]
    left = "SELECT id FROM run WHERE lease_until > now() + interval '10 s'"
    assert [row[0] for row in await database.pool.fetch(left)] == [ids[2]]


async def test_a_stolen_lease_cancels_the_step(database: Database, world: World[Any], table: None) -> None:
    async with Runner(world=world, registry=toys.registry()) as runner:
        async with database.session() as session:
            run_id = await kernel.start(session, "sleeper", "stolen")
        runner.submit(run_id)
        async with asyncio.timeout(10):
            while not await database.pool.fetchval("SELECT count(*) FROM effect"):
                await asyncio.sleep(0.02)
            await database.pool.execute("UPDATE run SET lease = 1")
            await runner.renew()
            while runner.in_flight:
                await asyncio.sleep(0.02)
    assert await database.pool.fetchval("SELECT lease FROM run") == 1


async def test_closing_gives_work_back_untried(database: Database, world: World[Any], table: None) -> None:
    async with Runner(world=world, registry=toys.registry()) as runner:
        async with database.session() as session:
            run_id = await kernel.start(session, "sleeper", "closing")
        runner.submit(run_id)
        async with asyncio.timeout(10):
            while not await database.pool.fetchval("SELECT count(*) FROM effect"):
                await asyncio.sleep(0.02)
    run = await database.pool.fetchrow("SELECT lease, attempt, wake_at <= now() AS is_due FROM run")
    assert tuple(run) == (None, 0, True)


@pytest.mark.parametrize("error", [OSError("the answer was lost"), asyncio.CancelledError()])
async def test_a_commit_whose_answer_was_lost_is_not_turned_back(
    database: Database, runners: list[Runner], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The hop is on the disk, its answer is not here: the run goes on from the next step, its effect stays single."""
    from controlplane.kernel.database import _Connection

    lost: list[str] = []
    execute = _Connection.execute

    async def lossy(self: _Connection, query: str, *arguments: object, **options: Any) -> str:
        answer = await execute(self, query, *arguments, **options)
        if query == "COMMIT" and not lost:
            lost.append(query)
            raise error
        return answer

    monkeypatch.setattr(_Connection, "execute", lossy)
    async with database.session() as session:
        run_id = await kernel.start(session, "leaf", "lossy")
    with contextlib.suppress(asyncio.CancelledError):
        await runners[0].advance(run_id)
    run = await database.pool.fetchrow("SELECT step, lease FROM run WHERE id = $1", run_id)
    assert lost
    assert tuple(run) == ("two", None)
    await sweep_until(runners, database)
    counts = await database.pool.fetch("SELECT count(*) FROM effect WHERE is_exact GROUP BY step")
    assert [row[0] for row in counts] == [1] * 5


async def test_a_claim_cut_off_is_given_back(database: Database, world: World[Any], table: None) -> None:
    """Cancelled at any moment between sending the claim and having the run: nothing stays leased."""
    async with database.session() as session:
        for number in range(30):
            await kernel.start(session, "sleeper", f"cut{number}")
    for moment in range(12):
        async with Runner(world=world, registry=toys.registry()) as runner:
            sweep = asyncio.create_task(runner.sweep(ALL_SHARDS))
            for _ in range(moment):
                await asyncio.sleep(0.0005)
            sweep.cancel()
            await asyncio.gather(sweep, return_exceptions=True)
        assert await database.pool.fetchval("SELECT count(*) FROM run WHERE lease IS NOT NULL") == 0


async def test_room_is_bounded_and_the_rest_stays_due(database: Database, world: World[Any], table: None) -> None:
    async with Runner(world=world, registry=toys.registry(), max_steps_in_flight=3) as runner:
        async with database.session() as session:
            ids = [await kernel.start(session, "sleeper", f"many{n}") for n in range(8)]
        assert [runner.submit(run_id) for run_id in ids[:4]] == [True, True, True, False]
        assert await runner.sweep(ALL_SHARDS) == 0
    assert await database.pool.fetchval("SELECT count(*) FROM run WHERE wake_at <= now() AND lease IS NULL") == 8


async def test_a_missed_deadline_is_counted_once_and_the_run_goes_on(database: Database, runners: list[Runner]) -> None:
    async with database.session() as session:
        run_id = await kernel.start(session, "tree", "late")
    await runners[0].advance(run_id)
    await database.pool.execute("UPDATE run SET deadline_at = now() - interval '7 s' WHERE id = $1", run_id)
    assert await look_at_deadlines(runners[0], ALL_SHARDS) == 1
    assert await look_at_deadlines(runners[0], ALL_SHARDS) == 0
    incident = await database.pool.fetchrow("SELECT * FROM incident")
    assert (incident["code"], incident["step"]) == ("run.deadline_missed", "listen")
    assert "listen was to be left 7 s ago" in incident["detail"]
    await sweep_until(runners, database)
    assert await database.pool.fetchval("SELECT count(*) FROM incident WHERE resolved_at IS NULL") == 0


async def test_shards_are_shared_and_taken_over(database: Database) -> None:
    first, second = ShardKeeper(database, "first"), ShardKeeper(database, "second")
    assert len(await first.tick()) == 64
    assert await second.tick() == set()
    assert len(await first.tick()) == 32
    assert len(await second.tick()) == 32
    assert not first.held & second.held
    await database.pool.execute("UPDATE shard SET lease_until = now() - interval '1 s' WHERE worker = 'first'")
    await database.pool.execute("UPDATE worker_presence SET present_until = now() - interval '1 s' WHERE worker = 'first'")
    assert len(await second.tick()) == 64
    await second.leave()
    assert len(await first.tick()) == 64
    ahead = "SELECT max(lease_until) - now() < interval '12 s' FROM shard"
    assert await database.pool.fetchval(ahead), "a dead worker's shards are free within 15 s"
