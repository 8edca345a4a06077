"""Runs steps: claim → step → hop, settle, release, park or finish. One runner a process, many runs at a time.

The one rule: the runner holds nothing that PostgreSQL does not know; kill it anywhere and the sweep goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Sequence
from typing import Any, Self

import asyncpg

from controlplane.kernel import incident, metrics, sql
from controlplane.kernel.database import Database
from controlplane.kernel.incident import DEADLINE_MISSED, PATIENCE, PROGRAM_UNKNOWN, SUBJECT_GONE
from controlplane.kernel.outcome import Done, Goto, LeaseLost, Outcome, SubjectGone, Terminal, Wait
from controlplane.kernel.program import DESTROY, START
from controlplane.kernel.registry import AnyProgram, Registry
from controlplane.kernel.work import Work, Written
from controlplane.kernel.world import World

log = logging.getLogger(__name__)
RENEW_SECONDS = 5.0
_TIMER_SECONDS = 60.0  # wake-ups nearer than this get a timer of their own; the sweep finds the others


class Runner:
    """`submit` what may be due; the runner claims it and drives it. Use as `async with`: leaving gives all work back."""

    chain = 1000  # steps in one claim; a longer chain is given back so that nobody starves

    def __init__(self, *, world: World[Any], registry: Registry, max_steps_in_flight: int = 64) -> None:
        self.world = world
        self.database: Database = world.database
        self.registry = registry
        self.max_steps_in_flight = max_steps_in_flight
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()
        self._held: dict[str, tuple[int, asyncio.Task[Any] | None]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        self._renewer = asyncio.create_task(self._renew_forever())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop: running steps are cancelled and given back untried."""
        self._is_closing = True
        await asyncio.sleep(0)  # a task cancelled before it begins could not give its run back
        for timer in self._timers.values():
            timer.cancel()
        tasks = [*self._tasks.values(), *([self._renewer] if self._renewer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what is due --------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._tasks)

    def submit(self, run_id: str) -> bool:
        """Try to claim this run soon. False: too much is in flight; the run stays due and the sweep finds it."""
        if self._is_closing:
            return False
        if run_id in self._tasks:
            self._again.add(run_id)
            return True
        if len(self._tasks) >= self.max_steps_in_flight:
            return False
        self._track(run_id, asyncio.create_task(self._advance(run_id)))
        return True

    async def sweep(self, shards: Sequence[int], limit: int | None = None) -> int:
        """Claim what is due in these shards, as much as there is room for; returns how many runs were taken."""
        room = self.max_steps_in_flight - len(self._tasks)
        room = room if limit is None else min(room, limit)
        if room <= 0 or self._is_closing:
            return 0
        rows = await self._lease(sql.CLAIM_BY_SHARD, list(shards), _new_lease(), self.registry.seconds_json, room)
        for row in rows:
            self._held[row["id"]] = (row["lease"], None)
            self._track(row["id"], asyncio.create_task(self._drive(row)))
        return len(rows)

    async def advance(self, run_id: str) -> bool:
        """Claim and drive one run until it rests; False when it was not due. For tests."""
        is_run = False
        while (row := await self._claim(run_id)) is not None:
            is_run = True
            await self._drive(row)
            if run_id not in self._again:
                break
            self._again.discard(run_id)
        return is_run

    def _track(self, run_id: str, task: asyncio.Task[None]) -> None:
        self._tasks[run_id] = task
        task.add_done_callback(lambda done: self._ended(run_id, done))

    def _ended(self, run_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("run %s: %s", run_id, incident.words(error), exc_info=error)
        if run_id in self._again:
            self._again.discard(run_id)
            self.submit(run_id)

    def _wake_in(self, run_id: str, seconds: float) -> None:
        if seconds > _TIMER_SECONDS or self._is_closing:
            return
        if (timer := self._timers.pop(run_id, None)) is not None:
            timer.cancel()
        self._timers[run_id] = asyncio.get_running_loop().call_later(seconds + 0.002, self._woken, run_id)

    def _woken(self, run_id: str) -> None:
        self._timers.pop(run_id, None)
        self.submit(run_id)

    # -- leases -------------------------------------------------------------------------------------------------------

    async def _claim(self, run_id: str) -> asyncpg.Record | None:
        rows = await self._lease(sql.CLAIM_BY_ID, run_id, _new_lease(), self.registry.seconds_json)
        for row in rows:
            self._held[run_id] = (row["lease"], None)
            return row
        return None

    async def _lease(self, statement: str, *arguments: object) -> list[asyncpg.Record]:
        """Claim. Cancelled meanwhile, or claimed while we close: what the server leased is given back, not kept 15 s."""
        claim = asyncio.ensure_future(self.database.leases.fetch(statement, *arguments))
        try:
            rows = await asyncio.shield(claim)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self._give_back(await claim)
            raise
        if self._is_closing:
            await self._give_back(rows)
            return []
        return rows

    async def _give_back(self, rows: Sequence[asyncpg.Record]) -> None:
        for row in rows:
            await self.database.pool.execute(sql.PUT_BACK, row["id"], row["lease"], row["step"])

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self.renew()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning("leases were not renewed: %s", incident.words(error))

    async def renew(self) -> None:
        """Renew every lease of this process in one statement; steps whose lease another worker has are cancelled."""
        held = dict(self._held)
        if not held:
            return
        lost = await self.database.leases.fetch(sql.RENEW, list(held), [lease for lease, _ in held.values()])
        for (run_id,) in lost:
            lease, task = held[run_id]
            if self._held.get(run_id, (None, None))[0] == lease and task is not None:
                metrics.LEASE_LOST.inc()
                task.cancel(LeaseLost(run_id))

    # -- driving ------------------------------------------------------------------------------------------------------

    async def _advance(self, run_id: str) -> None:
        row = await self._claim(run_id)
        if row is not None:
            await self._drive(row)

    def _work_of(self, row: asyncpg.Record) -> Work:
        return Work.of(row, self.database, self.registry.seconds.get(row["program"], {}))

    async def _drive(self, row: asyncpg.Record) -> None:
        work = self._work_of(row)
        self._held[work.run_id] = (work.lease, asyncio.current_task())
        try:
            await self._chain(work)
        except LeaseLost:
            metrics.LEASE_LOST.inc()
            log.warning("run %s: the lease was lost in step %s", work.run_id, work.step)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await self.database.pool.execute(sql.PUT_BACK, work.run_id, work.lease, work.step)
            raise
        finally:
            if self._held.get(work.run_id, (None, None))[0] == work.lease:
                del self._held[work.run_id]

    async def _chain(self, work: Work) -> None:
        """Step after step until the run rests, ends, fails, or somebody asks for its end."""
        program = self.registry.get(work.program)
        if program is None:
            await self._release(work, LookupError(f"this worker has no program named {work.program}"), PROGRAM_UNKNOWN)
            return
        for _ in range(self.chain):
            if work.step == START:
                work.step = program.first_step
            if work.step not in program.steps:
                await self._park(work, Terminal("run.step_unknown", f"{work.program} has no step {work.step}"))
                return
            was = (work.step, work.attempt, work.last_error, work.overdue_at)
            written = await self._step(program, work)
            if written is None:
                return
            await self._settle_incidents(work, was)
            if not isinstance(written.outcome, Goto):
                self._rest(work, written)
                return
            if written.is_urgent:
                break
        await self.database.pool.execute(sql.PUT_BACK, work.run_id, work.lease, work.step)
        self._again.add(work.run_id)

    async def _step(self, program: AnyProgram, work: Work) -> Written | None:
        """One try of one step; None when it failed (and was released or parked)."""
        name, begun, label = work.step, time.monotonic(), "failed"
        work.written = None
        work.words.clear()
        try:
            outcome = await self._call(program, work)
            if work.written is None or work.written.outcome is not outcome:
                await work.write(outcome)
            label = type(outcome).__name__.lower()
        except (LeaseLost, asyncio.CancelledError):
            label = "lost"
            raise
        except Terminal as terminal:
            label = "terminal"
            await self._park(work, terminal)
        except Exception as error:  # noqa: BLE001 - any failure of a step means: try again
            await self._release(work, error, incident.code_of(error))
        finally:
            metrics.STEPS.labels(work.program, name, label).inc()
            metrics.STEP_SECONDS.labels(work.program, name).observe(time.monotonic() - begun)
        return work.written

    async def _call(self, program: AnyProgram, work: Work) -> Outcome:
        instance = program(work, self.world)
        await instance.load_subject()
        work.subject_name = instance.subject_name
        try:
            outcome = await getattr(instance, work.step)()
        except SubjectGone as gone:
            if work.step == DESTROY:
                return Done(None)  # an earlier try of destroy removed the row
            raise Terminal(SUBJECT_GONE, str(gone)) from gone
        if isinstance(outcome, Goto) and (work.destroy_at is not None or outcome.step not in program.steps):
            raise Terminal("run.step_unknown", f"{program.name}.{work.step} cannot go to {outcome.step}")
        return outcome

    def _rest(self, work: Work, written: Written) -> None:
        match written.outcome:
            case Wait(seconds=float() | int() as seconds) if not written.is_urgent:
                self._wake_in(work.run_id, float(seconds))
            case _ if written.is_refused:
                self._wake_in(work.run_id, 0.02)
            case _ if written.is_urgent:
                self._again.add(work.run_id)
            case _:
                pass

    # -- failures -----------------------------------------------------------------------------------------------------

    async def _release(self, work: Work, error: Exception, code: str) -> None:
        text = incident.words(error)
        row = await self.database.pool.fetchrow(sql.RELEASE, work.run_id, work.lease, text, work.step, code)
        if row is None:
            raise LeaseLost(work.run_id) from error
        log.warning("run %s: %s.%s, try %d: %s", work.run_id, work.program, work.step, work.attempt, text, exc_info=error)
        if work.attempt >= PATIENCE or code == PROGRAM_UNKNOWN:
            detail = f"{incident.about(work)}: step {work.step} has failed {work.attempt} times: {text}"
            await incident.open_run_incident(self.database.pool, work, code, detail)
        self._wake_in(work.run_id, row["seconds"])

    async def _park(self, work: Work, terminal: Terminal) -> None:
        written = await work.park(terminal.code, terminal.detail)
        log.error("run %s: %s.%s parked: %s: %s", work.run_id, work.program, work.step, terminal.code, terminal.detail)
        detail = f"{incident.about(work)}: step {work.step} cannot go on: {terminal.detail}"
        await incident.open_run_incident(self.database.pool, work, terminal.code, detail)
        self._rest(work, written)

    async def _settle_incidents(self, work: Work, was: tuple[str, int, str | None, object]) -> None:
        """Close what an outcome has healed: failing tries, a late step that was left, all of an ended run."""
        step, attempt, last_error, overdue_at = was
        written = work.written
        if written is None:
            return
        if isinstance(written.outcome, Done):
            if not written.is_refused:
                await incident.resolve_run_incidents(self.database.pool, work.run_id)
        elif last_error is not None or attempt > PATIENCE:
            await incident.resolve_run_incidents(self.database.pool, work.run_id, but=[DEADLINE_MISSED])
        if overdue_at is not None and work.step != step:
            await incident.resolve_run_incidents(self.database.pool, work.run_id, [DEADLINE_MISSED])


def _new_lease() -> int:
    return random.getrandbits(62)
