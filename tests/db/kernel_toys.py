"""Toy programs for the kernel's tests, and `python -m tests.db.kernel_toys`: a real worker process that runs them.

`effect` rows with `is_exact` are written in the transaction of the outcome and must be there exactly once.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import asyncpg

from controlplane.kernel.program import Memo, Outcome, Program, done, goto, step, wait
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.registry import Registry

SOON = timedelta(minutes=5)
CHILDREN = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS effect (
    id bigserial PRIMARY KEY, subject text NOT NULL, step text NOT NULL, is_exact bool NOT NULL,
    at timestamptz DEFAULT clock_timestamp())"""
INSERT = "INSERT INTO effect (subject, step, is_exact) VALUES ($1, $2, $3)"


class LeafProgram(Program[str]):
    """Five exact steps, one that is at-least-once, and a word to the parent from each third."""

    async def _exact(self, name: str, then) -> Outcome:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, name, True)
            return tx.goto(then)

    @step(within=SOON)
    async def one(self) -> Outcome:
        return await self._exact("one", self.two)

    @step(within=SOON)
    async def two(self) -> Outcome:
        self.signal_parent("child_says", {"step": "two"})
        return await self._exact("two", self.loose)

    @step(within=SOON)
    async def loose(self) -> Outcome:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, "loose", False)
        return goto(self.three)

    @step(within=SOON)
    async def three(self) -> Outcome:
        async with self.tx() as tx:
            await tx.conn.execute(INSERT, self.subject, "three", True)
            return tx.goto(self.four)

    @step(within=SOON)
    async def four(self) -> Outcome:
        self.signal_parent("child_says", {"step": "four"})
        await self._exact("four", self.five)
        return wait(seconds=0) if self._work.written is None else self._work.written.outcome

    @step(within=SOON)
    async def five(self) -> Outcome:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, "five", True)
            return tx.done({"leaf": self.subject})

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class TreeMemo(Memo):
    heard: int = 0


class TreeProgram(Program[str]):
    """Spawns leaves, counts what they say, and ends when all have."""

    memo: TreeMemo

    @step(within=SOON)
    async def grow(self) -> Outcome:
        self.spawn(LeafProgram, *(f"{self.subject}.{number}" for number in range(CHILDREN)))
        return goto(self.listen)

    @step(within=SOON)
    async def listen(self) -> Outcome:
        self.memo.heard += len(self.signals)
        async with self.tx() as tx:
            if not await self.children_gone():
                return tx.wait(seconds=20)
            await tx.conn.execute(INSERT, self.subject, "listen", True)
            return tx.done({"heard": self.memo.heard})

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class SleeperProgram(Program[str]):
    """Says that it began, and holds its lease until it is killed or `goes`."""

    @step(within=SOON)
    async def sleep(self) -> Outcome:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, "sleep", False)
            go = await tx.conn.fetchval("SELECT count(*) FROM effect WHERE subject = $1 AND step = 'go'", self.subject)
        if not go:
            await asyncio.sleep(3600)
        return done()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class EchoProgram(Program[str]):
    """Writes down every signal, in the transaction that consumes it."""

    @step(within=None)
    async def hear(self) -> Outcome:
        async with self.raw_tx() as tx:
            for told in self.signals:
                await tx.conn.execute(INSERT, self.subject, f"heard {told.body.get('n')}", True)
            return tx.wait()

    @step(within=SOON)
    async def destroy(self) -> Outcome:
        return done()


class TickReconciler(Reconciler[str]):
    every = timedelta(seconds=0.2)

    async def reconcile(self) -> None:
        async with self.raw_tx() as tx:
            await tx.conn.execute(INSERT, self.subject, "tick", False)


TOYS = [LeafProgram, TreeProgram, SleeperProgram, EchoProgram, TickReconciler]


def registry() -> Registry:
    return Registry(TOYS)


async def make_table(pool: asyncpg.Pool) -> None:
    await pool.execute(SCHEMA)


if __name__ == "__main__":
    import logging

    from controlplane.settings import Settings
    from controlplane.worker import main

    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.exit(main.run(Settings(), registry()))
