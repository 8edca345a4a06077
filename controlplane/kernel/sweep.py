"""The sweep: asks PostgreSQL what is due in our shards, counts missed deadlines, forgets what ended long ago.

The one rule: with this alone (no messages at all) every run proceeds; messages only make it quicker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

import asyncpg

from controlplane.core import json
from controlplane.core.ids import Kind, new_id
from controlplane.kernel import metrics, sql
from controlplane.kernel.incident import DEADLINE_MISSED
from controlplane.kernel.runner import Runner
from controlplane.kernel.shard import ShardKeeper

log = logging.getLogger(__name__)
SWEEP_SECONDS = 1.0
DEADLINE_SECONDS = 5.0
_HEAL_SECONDS = 60.0
_PRUNE_SECONDS = 3600.0
KEEP_DAYS = 30


class Sweeper:
    """Sweeps every second, and sooner when `hurry` is called (a message named a shard)."""

    def __init__(self, runner: Runner, keeper: ShardKeeper) -> None:
        self.runner = runner
        self.keeper = keeper
        self._hurry = asyncio.Event()
        self._deadlines_at = 0.0
        self._heal_at = 0.0
        self._prune_at = time.monotonic() + _PRUNE_SECONDS

    def hurry(self) -> None:
        self._hurry.set()

    async def run(self) -> None:
        while True:
            try:
                await self.once()
            except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning("the sweep failed: %s", error)
            self._hurry.clear()
            try:
                await asyncio.wait_for(self._hurry.wait(), SWEEP_SECONDS)
            except TimeoutError:
                continue

    async def once(self) -> None:
        shards = sorted(self.keeper.held)
        if not shards:
            return
        await self.runner.sweep(shards)
        now = time.monotonic()
        if now >= self._deadlines_at:
            self._deadlines_at = now + DEADLINE_SECONDS
            await look_at_deadlines(self.runner, shards)
        if now >= self._heal_at and 0 in self.keeper.held:
            self._heal_at = now + _HEAL_SECONDS
            await close_healed(self.runner)
        if now >= self._prune_at and 0 in self.keeper.held:
            self._prune_at = now + _PRUNE_SECONDS
            await self.runner.database.pool.execute(sql.PRUNE, KEEP_DAYS)


async def close_healed(runner: Runner) -> int:
    """Close the incidents whose run has ended or is well again; returns how many were still open."""
    return len(await runner.database.pool.fetch(sql.RESOLVE_HEALED_INCIDENTS, DEADLINE_MISSED))


async def look_at_deadlines(runner: Runner, shards: Collection[int]) -> int:
    """Count each missed deadline once and open its incident; the runs go on. Returns how many were new."""
    pool = runner.database.pool
    late = await pool.fetch(sql.MISSED_DEADLINES, list(shards))
    for row in late:
        metrics.DEADLINE_MISSED.labels(row["program"], row["step"]).inc()
        detail = f"{row['program']} {row['subject']}: step {row['step']} was to be left {row['seconds_late']:.0f} s ago"
        why = f"; try {row['attempt']} failed: {row['last_error']}" if row["last_error"] else "; it is still waiting"
        log.warning("run %s: %s", row["id"], detail + why)
        await pool.execute(
            sql.OPEN_INCIDENT,
            new_id(Kind.INCIDENT),
            DEADLINE_MISSED,
            row["subject"],
            row["id"],
            row["program"],
            row["step"],
            detail + why,
            json.dumps({"attempt": row["attempt"]}).decode(),
        )
    metrics.OVERDUE.set(await pool.fetchval(sql.COUNT_OVERDUE, list(shards)))
    return len(late)
