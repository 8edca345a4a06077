"""Nudges go out after the commit that made the run, never at a savepoint on the way."""

from __future__ import annotations

from controlplane.kernel import service as kernel
from controlplane.kernel.database import Database


class Heard:
    """A publisher that notes which runs were visible to others when they were announced."""

    def __init__(self) -> None:
        self.due_runs: list[str] = []

    def due(self, run_id: str, shard: int) -> None:
        del shard
        self.due_runs.append(run_id)


async def test_a_savepoint_publishes_nothing(database_url: str) -> None:
    heard = Heard()
    database = await Database.open(database_url, pool_size=2, publisher=heard)
    try:
        async with database.session() as session:
            first = await kernel.start(session, "toy", "one")
            async with session.begin_nested():
                second = await kernel.start(session, "toy", "two")
            assert heard.due_runs == []
            nested = await session.begin_nested()
            await nested.rollback()
            assert heard.due_runs == []
        assert sorted(heard.due_runs) == sorted([first, second])
    finally:
        await database.close()
