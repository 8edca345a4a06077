"""The kernel's statements fit the schema, use their indexes, and the schema refuses illegal rows."""

from __future__ import annotations

import asyncpg
import pytest

from controlplane.kernel import sql
from controlplane.kernel.database import Database

STATEMENTS = {
    name: text
    for name, text in vars(sql).items()
    if name.isupper() and not name.startswith("_") and isinstance(text, str) and " " in text and name != "BEGIN_FENCED"
}


@pytest.mark.parametrize("name", sorted(STATEMENTS))
async def test_statement_fits_the_schema(database: Database, name: str) -> None:
    async with database.pool.acquire() as connection:
        await connection.prepare(STATEMENTS[name])


FILL = """
INSERT INTO run (id, program, subject, shard, wake_at, finished_at, step)
SELECT 'run_' || n, 'p', 's' || n, n % 64, NULL, CASE WHEN n % 10 < 8 THEN now() END, 'x' FROM generate_series(1, 20000) AS n"""


async def test_the_halves_of_the_sweep_use_their_partial_indexes(database: Database) -> None:
    await database.pool.execute(FILL)
    await database.pool.execute("UPDATE run SET wake_at = now() WHERE finished_at IS NULL AND hashtext(id) % 50 = 0")
    await database.pool.execute(
        "INSERT INTO signal (run_id, kind, seen_at) SELECT 'run_' || n, 'k', CASE WHEN n > 50 THEN now() END"
        " FROM generate_series(1, 20000) AS n"
    )
    await database.pool.execute("ANALYZE run, signal")
    async with database.pool.acquire() as connection:
        await connection.execute("SET plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE sweep (smallint[], bigint, jsonb, bigint) AS {sql.CLAIM_BY_SHARD}")
        plan = "\n".join(
            row[0] for row in await connection.fetch("EXPLAIN EXECUTE sweep (ARRAY[1, 2]::smallint[], 1, '{}'::jsonb, 16)")
        )
        await connection.execute("SET plan_cache_mode = auto")
    assert "run_due_idx" in plan
    assert "signal_unseen_idx" in plan
    assert "Seq Scan on run" not in plan
    assert "Seq Scan on signal" not in plan


RUN = "INSERT INTO run (id, program, subject, shard, {0}) VALUES ('run_x', 'p', 's', 1, {1})"


@pytest.mark.parametrize(
    ("columns", "values", "law"),
    [
        ("lease", "1", "run_lease_has_an_end"),
        ("lease, lease_until, wake_at", "1, now(), NULL", "run_leased_has_its_retry"),
        ("parked_at, wake_at", "now(), NULL", "run_parked_says_why"),
        ("parked_at, parked_code", "now(), 'x'", "run_parked_is_at_rest"),
        ("finished_at", "now()", "run_finished_is_at_rest"),
        ("result", "'{}'", "run_result_only_finished"),
        ("destroy_at", "now()", "run_destroy_is_its_step"),
        ("overdue_at", "now()", "run_overdue_had_a_deadline"),
        ("step", "''", "run_names_are_given"),
        ("attempt", "-1", "run_attempt_counts"),
    ],
)
async def test_illegal_runs_are_refused_by_name(database: Database, columns: str, values: str, law: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await database.pool.execute(RUN.format(columns, values))
    assert refused.value.constraint_name == law


async def test_unfinished_runs_are_unique(database: Database) -> None:
    insert = "INSERT INTO run (id, program, subject, shard, wake_at, finished_at) VALUES ($1, 'p', 's', 1, NULL, {})"
    await database.pool.execute(insert.format("now()"), "run_1")
    await database.pool.execute(insert.format("NULL"), "run_2")
    with pytest.raises(asyncpg.UniqueViolationError):
        await database.pool.execute(insert.format("NULL"), "run_3")


async def test_old_runs_are_forgotten_with_what_belongs_to_them(database: Database) -> None:
    for run_id, days in (("run_old", 31), ("run_new", 29)):
        await database.pool.execute(
            "INSERT INTO run (id, program, subject, shard, wake_at, finished_at)"
            " VALUES ($1, 'p', $1, 1, NULL, now() - $2::int * interval '1 day')",
            run_id,
            days,
        )
        await database.pool.execute("INSERT INTO signal (run_id, kind) VALUES ($1, 'late')", run_id)
        await database.pool.execute("INSERT INTO run_child VALUES ($1, 'run_child')", run_id)
    await database.pool.execute(sql.PRUNE, 30)
    for table in ("SELECT id FROM run", "SELECT run_id FROM signal", "SELECT parent FROM run_child"):
        assert [row[0] for row in await database.pool.fetch(table)] == ["run_new"]
