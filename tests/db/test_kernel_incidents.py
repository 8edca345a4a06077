"""Incidents close when their cause is gone, and say what it was."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.kernel import incident
from controlplane.kernel.database import Database
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.sweep import close_healed
from controlplane.kernel.world import World
from tests.db.test_kernel_runs import LOG, BrokenProgram, begin, make_due


@pytest.fixture
async def runner(world: World[Any]):
    LOG.clear()
    async with Runner(world=world, registry=Registry([BrokenProgram])) as runner:
        yield runner


async def test_incidents_that_nobody_could_close_are_closed_by_the_sweep(database: Database, runner: Runner) -> None:
    """A worker died between the outcome and the closing; what still fails stays open."""
    ended, parked, failing = [await begin(database, "broken", name) for name in ("e", "terminal-p", "f")]
    await runner.advance(parked)
    for _ in range(3):
        await make_due(database, failing)
        await runner.advance(failing)
    await database.pool.execute(
        "UPDATE run SET finished_at = now(), wake_at = NULL, lease = NULL, lease_until = NULL WHERE id = $1", ended
    )
    insert = "INSERT INTO incident (id, code, subject, run_id, program, step, detail) VALUES ($1, $2, 's', $3, 'p', 'x', 'd')"
    for number, run_id in enumerate([ended, "run_pruned", failing]):
        code = incident.DEADLINE_MISSED if run_id == failing else "toy.broken"
        await database.pool.execute(insert, f"inc_{number}", code, run_id)
    assert await close_healed(runner) == 3
    left = await database.pool.fetch("SELECT run_id, detail FROM incident WHERE resolved_at IS NULL ORDER BY detail")
    assert [row["run_id"] for row in left] == [failing, parked]
    assert "the wire is cut" in left[0]["detail"]
    assert "replace it" in left[1]["detail"]


def test_words_name_a_cause() -> None:
    assert incident.words(TimeoutError()) == "it took too long"
    assert incident.words(OSError("disk full")) == "disk full"
    assert incident.words(KeyError("boot_id")) == "KeyError: 'boot_id'"
    assert incident.words(ConnectionResetError()) == "the other side cut the connection"
