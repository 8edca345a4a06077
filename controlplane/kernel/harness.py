"""Tries a program as the world will: every step twice, crashes, stolen leases, `destroy` after every step.

The one rule: each trial is a life of its own, from `make` to a finished run, and after it nothing may be left.
For tests; nothing in the product imports it. Waits are skipped, so a life takes milliseconds. Who rests and was told
nothing looks only when nothing else moves: the clock of a minute strikes after the seconds that others wait for.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import asyncpg

from controlplane.kernel import service
from controlplane.kernel.outcome import LeaseLost, Outcome
from controlplane.kernel.program import DESTROY
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.service import Connection
from controlplane.kernel.tx import RawTx, Tx
from controlplane.kernel.work import Work, Written
from controlplane.kernel.world import World

MOST_STEPS = 500
_DUE = """
SELECT id, program, step, ready_at IS NOT NULL AND lease IS NULL AND last_error IS NULL
    AND NOT EXISTS (SELECT FROM signal WHERE run_id = run.id AND seen_at IS NULL) AS may_rest
FROM run WHERE finished_at IS NULL AND (
    (parked_at IS NULL AND (wake_at IS NOT NULL OR EXISTS (SELECT FROM signal WHERE run_id = run.id AND seen_at IS NULL)))
    OR EXISTS (SELECT FROM signal WHERE run_id = run.id AND seen_at IS NULL AND kind IN ('destroy', 'resume')))
ORDER BY id"""
_SKIP_WAIT = """
UPDATE run SET not_before = now(), wake_at = CASE WHEN wake_at IS NOT NULL THEN now() END,
    lease_until = CASE WHEN lease IS NOT NULL THEN now() - interval '1 second' END
WHERE id = $1 AND finished_at IS NULL"""
_STEAL = "UPDATE run SET lease = lease + 1 WHERE id = $1"
_RUN = "SELECT * FROM run WHERE program = $1 AND subject = $2 ORDER BY id DESC LIMIT 1"


class Fault(StrEnum):
    NONE = "no fault"
    CRASH = "a crash between effect and settle, so that every step runs twice"
    STOLEN = "the lease stolen before the first write, so that every step runs twice"


class HarnessFailed(AssertionError):
    """A program did not survive; the message says which life, why, and the steps that led there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One program and how to try it.

    `make(world, n)`: commit the n-th subject's rows, start its run (`kernel.start`), return the subject.
    `leftovers(world, subject)`: name what should be gone when the run has finished (rows, objects on hosts, children).
    `nudge(world, subject, step)`: play the outside when every run only waits (let the host finish, send its event).
    `changes`: signals that the run must survive in its rest step. `may_park`: a life may end parked, then destroyed.
    `patience`: so many rounds may go by in which every run only polled or failed.
    """

    registry: Registry
    program: str
    make: Callable[[World[Any], int], Awaitable[str]]
    leftovers: Callable[[World[Any], str], Awaitable[Sequence[str]]]
    nudge: Callable[[World[Any], str, str], Awaitable[None]] | None = None
    changes: Sequence[str] = ("changed",)
    may_park: bool = False
    patience: int = 12


class _Crash(BaseException):
    """The process died here."""


@dataclass(slots=True, kw_only=True)
class _Faults:
    """What goes wrong, once for each step of each run."""

    fault: Fault
    done: set[tuple[str, str]] = field(default_factory=set)

    def is_next(self, work: Work) -> bool:
        key = (work.run_id, work.step)
        if self.fault is Fault.NONE or key in self.done:
            return False
        self.done.add(key)
        return True


@dataclass(slots=True, kw_only=True)
class _FaultyWork(Work):
    """Dies, or loses its lease, where an outcome is about to be written."""

    faults: _Faults = field(default_factory=lambda: _Faults(fault=Fault.NONE))

    @asynccontextmanager
    async def tx(self) -> AsyncIterator[Tx]:
        await self._steal()
        async with Work.tx(self) as tx:
            yield tx

    @asynccontextmanager
    async def raw_tx(self) -> AsyncIterator[RawTx]:
        await self._steal()
        async with Work.raw_tx(self) as tx:
            yield tx

    async def write(self, outcome: Outcome) -> None:
        if self.faults.fault is Fault.CRASH and self.faults.is_next(self):
            raise _Crash
        await self._steal()
        await Work.write(self, outcome)

    async def end(self, connection: Connection, outcome: Outcome | None) -> Written | None:
        written = await Work.end(self, connection, outcome)
        if outcome is not None and self.faults.fault is Fault.CRASH and self.faults.is_next(self):
            raise _Crash  # just before the commit
        return written

    async def _steal(self) -> None:
        if self.faults.fault is Fault.STOLEN and self.faults.is_next(self):
            await self.database.pool.execute(_STEAL, self.run_id)


class _SteppingRunner(Runner):
    """One step for each claim, so that anything can happen between two."""

    chain = 1

    def __init__(self, world: World[Any], scenario: Scenario, fault: Fault) -> None:
        super().__init__(world=world, registry=scenario.registry)
        self.on_trial = scenario.program
        self.faults = _Faults(fault=fault)
        self.trace: list[str] = []
        self.steps = 0  # without the looks of others at rest: a life is not worth cutting after each of them

    def _work_of(self, row: asyncpg.Record) -> Work:
        work = _FaultyWork.of(row, self.database, self.registry.seconds.get(row["program"], {}))
        assert isinstance(work, _FaultyWork)
        work.faults = self.faults
        return work

    async def one_step(self, run_id: str) -> bool:
        """Claim and run one step; False when it was not due. A crash or a lost lease is part of the play."""
        await self.database.pool.execute(_SKIP_WAIT, run_id)
        row = await self._claim(run_id)
        if row is None:
            return False
        self.trace.append(f"{row['program']}.{row['step']}")
        self.steps += row["program"] == self.on_trial or not self.rests_in(row)
        with contextlib.suppress(_Crash, LeaseLost):
            await self._drive(row)
        return True

    def rests_in(self, run: asyncpg.Record) -> bool:
        """Whether the step that this run is in is one of rest."""
        return self.registry.seconds.get(run["program"], {}).get(run["step"], 0) is None


class Harness:
    """`await Harness(world, scenario).run()` tries everything."""

    def __init__(self, world: World[Any], scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self._lives = 0

    async def run(self, *, stride: int = 1) -> int:
        """All trials; returns how many lives that took. `stride` 2 destroys after each second step only, and so on."""
        await self.life(fault=Fault.STOLEN)
        for fault in (Fault.NONE, Fault.CRASH):
            steps = await self.life(fault=fault)
            for after in range(0, steps + 1, stride):
                if await self.life(fault=fault, destroy_after=after) < after:
                    break  # it had come to rest before
        return self._lives

    async def life(self, *, fault: Fault = Fault.NONE, destroy_after: int | None = None) -> int:
        """One subject from start to finished run; returns the steps that ran before the end was asked for."""
        self._lives += 1
        subject = await self.scenario.make(self.world, self._lives)
        runner = _SteppingRunner(self.world, self.scenario, fault)
        try:
            steps = await self._live(runner, subject, destroy_after)
            await self._die(runner, subject)
        except HarnessFailed as failure:
            when = "" if destroy_after is None else f", destroyed after {destroy_after} steps"
            trail = " → ".join(runner.trace[-40:])
            raise HarnessFailed(f"{subject}, with {fault}{when}: {failure}\nits steps: {trail}") from failure
        finally:
            await runner.close()
        return steps

    async def _live(self, runner: _SteppingRunner, subject: str, limit: int | None) -> int:
        """Until the run rests and has survived its changes, ends, parks, or `limit` steps went by."""
        changes = list(self.scenario.changes)
        idle = 0
        while (run := await self._run(subject))["finished_at"] is None:
            if run["parked_at"] is not None:
                if not self.scenario.may_park:
                    raise HarnessFailed(f"step {run['step']} parked: {run['parked_code']}: {run['parked_detail']}")
                break
            has_moved = await self._round(runner, limit)
            if limit is not None and runner.steps >= limit:
                break
            idle = 0 if has_moved else idle + 1
            if has_moved:
                continue
            run = await self._run(subject)
            if run["ready_at"] is not None and runner.rests_in(run):
                if not changes:
                    break
                await self._signal(subject, changes.pop(0))
            else:
                await self._nudge(subject, run, idle)
        return runner.steps

    async def _die(self, runner: _SteppingRunner, subject: str) -> None:
        """Ask for the end (unless it came), run until nothing moves, and look for leftovers."""
        if (await self._run(subject))["finished_at"] is None:
            await self._signal(subject, DESTROY)
        idle = 0
        while (run := await self._run(subject))["finished_at"] is None:
            if run["parked_at"] is not None and run["step"] == DESTROY:
                raise HarnessFailed(f"destroy parked: {run['parked_code']}: {run['parked_detail']}")
            idle = 0 if await self._round(runner, None) else idle + 1
            if idle:
                await self._nudge(subject, run, idle)
        while await self._round(runner, None, with_clock=False):
            pass
        if not await self.scenario.leftovers(self.world, subject):
            return
        while await self._round(runner, None):
            pass
        if left := list(await self.scenario.leftovers(self.world, subject)):
            raise HarnessFailed(f"left over: {', '.join(left)}")

    async def _round(self, runner: _SteppingRunner, limit: int | None, *, with_clock: bool = True) -> bool:
        """One step for every run that is due; whether any moved (to another step, or to its end, or crashed).

        When none did, one for every run at rest, unless without the clock.
        """
        resting, working = [], []
        for row in await self.world.database.pool.fetch(_DUE):
            (resting if row["may_rest"] and runner.rests_in(row) else working).append(row["id"])
        has_moved = await self._step_each(runner, working, limit)
        if not has_moved and with_clock:
            has_moved = await self._step_each(runner, resting, limit)
        if len(runner.trace) > MOST_STEPS:
            raise HarnessFailed(f"it does not come to rest in {MOST_STEPS} steps")
        return has_moved

    async def _step_each(self, runner: _SteppingRunner, run_ids: Sequence[str], limit: int | None) -> bool:
        pool = self.world.database.pool
        has_moved = False
        query = "SELECT step, memo, finished_at, parked_at, lease FROM run WHERE id = $1"
        for run_id in run_ids:
            if limit is not None and runner.steps >= limit:
                break
            before = await pool.fetchrow(query, run_id)
            await runner.one_step(run_id)
            has_moved |= before != await pool.fetchrow(query, run_id)
        return has_moved

    async def _nudge(self, subject: str, run: asyncpg.Record, idle: int) -> None:
        if idle > self.scenario.patience:
            raise HarnessFailed(f"step {run['step']} waits and nothing moves; its last error: {run['last_error']}")
        if self.scenario.nudge is not None:
            await self.scenario.nudge(self.world, subject, run["step"])

    async def _run(self, subject: str) -> asyncpg.Record:
        run = await self.world.database.pool.fetchrow(_RUN, self.scenario.program, subject)
        if run is None:
            raise HarnessFailed("make() started no run")
        return run

    async def _signal(self, subject: str, kind: str) -> None:
        async with self.world.database.session() as session:
            await service.signal(session, self.scenario.program, subject, kind)
