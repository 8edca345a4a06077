"""What services and steps say to runs: start, signal, destroy, resume — inside the caller's own transaction.

The one rule: they only INSERT. Nothing here waits for a step that runs at this moment, so a request and a step cannot
deadlock; what was said counts when the caller's transaction commits, and is published after that.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import json
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.core.json import Json
from controlplane.kernel import sql
from controlplane.kernel.database import DUE
from controlplane.models.run import SHARDS

Connection: TypeAlias = "asyncpg.Connection | asyncpg.pool.PoolConnectionProxy"
Where: TypeAlias = "AsyncSession | Connection | asyncpg.Pool"


async def fetch(where: Where, statement: str, *arguments: object) -> Sequence[Any]:
    """Rows of one of our statements in the transaction of a session, or on a raw connection."""
    if isinstance(where, AsyncSession):
        connection = await where.connection()
        result = await connection.exec_driver_sql(statement, arguments)
        return result.all() if result.returns_rows else []
    return await where.fetch(statement, *arguments)


def shard_of(key: str) -> int:
    """The shard of a host id or run id: stable for ever."""
    return zlib.crc32(key.encode()) % SHARDS


def _nudge(where: Where, run_id: str, shard: int) -> None:
    if isinstance(where, AsyncSession):
        where.info.setdefault(DUE, {})[run_id, shard] = None


async def start(where: Where, program: str, subject: str, *, host_id: str | None = None, traceparent: str | None = None) -> str:
    """Make sure that an unfinished run of `program` for `subject` exists, and return its id.

    Idempotent: one that exists is told by a signal `start` to look again. `host_id` puts a new run on its host's shard
    (a subject that is a host is there anyway).
    """
    await fetch(where, sql.LOCK_TO_SIGNAL, program, subject)
    while True:
        run_id = new_id(Kind.RUN)
        key = host_id or (subject if is_id(subject, Kind.HOST) else run_id)
        rows = await fetch(where, sql.START, run_id, program, subject, shard_of(key), traceparent)
        if rows:  # none: another transaction made it between the look and the insert
            break
    run_id, shard, is_new = rows[0]
    if not is_new:
        await fetch(where, sql.SIGNAL, program, subject, "start", "{}")
    _nudge(where, run_id, shard)
    return run_id


async def signal(where: Where, program: str, subject: str, kind: str, body: Mapping[str, Json] | None = None) -> str | None:
    """Tell the unfinished run a fact; returns its id, or None when there is none (then `start` one).

    What was said and committed is seen by a step, in order, at least once.
    """
    await fetch(where, sql.LOCK_TO_SIGNAL, program, subject)
    rows = await fetch(where, sql.SIGNAL, program, subject, kind, json.dumps(dict(body or {})).decode())
    if not rows:
        return None
    run_id, shard = rows[0]
    _nudge(where, run_id, shard)
    return run_id


async def destroy(where: Where, program: str, subject: str) -> str | None:
    """Ask for the end: the next claim (of a parked run too) sets `destroy_at` and goes to the step `destroy`.

    None: there is no unfinished run; start one and destroy it if something may be left.
    """
    return await signal(where, program, subject, "destroy")


async def resume(where: Where, program: str, subject: str) -> bool:
    """An operator's word that a parked run, with its parked parents and children, should try again. False: no run."""
    await fetch(where, sql.LOCK_TO_SIGNAL, program, subject)
    rows = await fetch(where, sql.RESUME, program, subject)
    for run_id, shard in rows:
        _nudge(where, run_id, shard)
    return bool(rows)
