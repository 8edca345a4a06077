"""From the journal into PostgreSQL: batches land once, whatever happens, and raise the hourly sums for new rows only.

The one rule: a batch is one statement, so record and sum cannot part; a batch landed twice changes nothing. All of
metering's SQL stands here.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import date, timedelta
from functools import partial

import asyncpg

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.metering import journal as journals
from controlplane.metering.journal import Closed, Entry, Journal, Progress
from controlplane.metering.record import Opening, row, settled_after_crash

log = logging.getLogger(__name__)

BATCH_ROWS = 1000
_READ_BYTES = 1 << 18

LAND = """
WITH batch AS (
  SELECT * FROM jsonb_to_recordset($1::jsonb) AS r(
    day date, gateway text, segment bigint, sequence bigint, started_at timestamptz, ended_at timestamptz,
    project_id text, key_id text, model text, endpoint_id text, replica_id text, request_id text, path text,
    is_stream boolean, outcome text, status int, prompt_tokens bigint, completion_tokens bigint, cached_tokens bigint,
    is_estimated boolean, is_billable boolean, attempts int, first_token_ms bigint)
), landed AS (
  INSERT INTO usage_record (
    day, gateway, segment, sequence, started_at, ended_at, project_id, key_id, model, endpoint_id, replica_id,
    request_id, path, is_stream, outcome, status, prompt_tokens, completion_tokens, cached_tokens, is_estimated,
    is_billable, attempts, first_token_ms)
  SELECT
    day, gateway, segment, sequence, started_at, ended_at, project_id, key_id, model, endpoint_id, replica_id,
    request_id, path, is_stream, outcome, status, prompt_tokens, completion_tokens, cached_tokens, is_estimated,
    is_billable, attempts, first_token_ms
  FROM batch
  ON CONFLICT DO NOTHING
  RETURNING *
), summed AS (
  INSERT INTO usage_hour AS u (
    hour, project_id, key_id, model, requests, prompt_tokens, completion_tokens, cached_tokens, estimated_requests,
    unbilled_requests)
  SELECT
    date_trunc('hour', started_at, 'UTC'), project_id, key_id, model, count(*),
    coalesce(sum(prompt_tokens) FILTER (WHERE is_billable), 0),
    coalesce(sum(completion_tokens) FILTER (WHERE is_billable), 0),
    coalesce(sum(cached_tokens) FILTER (WHERE is_billable), 0),
    count(*) FILTER (WHERE is_estimated), count(*) FILTER (WHERE NOT is_billable)
  FROM landed
  GROUP BY 1, 2, 3, 4
  ORDER BY 1, 2, 3, 4
  ON CONFLICT (hour, project_id, key_id, model) DO UPDATE SET
    requests = u.requests + excluded.requests,
    prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
    completion_tokens = u.completion_tokens + excluded.completion_tokens,
    cached_tokens = u.cached_tokens + excluded.cached_tokens,
    estimated_requests = u.estimated_requests + excluded.estimated_requests,
    unbilled_requests = u.unbilled_requests + excluded.unbilled_requests
)
SELECT count(*) FROM landed
"""

_PARTITION_LOCK = 0x0BED_0001


class Lander:
    """Carries one journal into the database; keeps nothing in memory but where it stands in each segment."""

    def __init__(self, journal: Journal, gateway: str) -> None:
        self._journal = journal
        self._gateway = gateway
        self._offsets: dict[int, int] = {}
        self._days: set[date] = set()
        self._is_recovered = not journal.inherited

    async def run_once(self, connection: asyncpg.Connection) -> int:
        """Land what there is; returns how many records were new. Raises what asyncpg raises: nothing is lost then."""
        landed = 0
        if not self._is_recovered:
            landed += await self._recover(connection)
            self._is_recovered = True
        live = self._journal.live_segments()
        for segment in journals.segments(self._journal.directory):
            landed += await self._advance(connection, segment)
            if segment not in live:
                await asyncio.to_thread(journals.drop, self._journal.directory, segment)
                self._offsets.pop(segment, None)
        return landed

    async def _advance(self, connection: asyncpg.Connection, segment: int) -> int:
        """Land the closed records of one segment from where we stand to its present end."""
        landed = 0
        while True:
            offset = self._offsets.get(segment, 0)
            entries, end = await self._read(segment, offset, closed_only=True)
            if end == offset:
                return landed
            closed = [row(self._gateway, entry.opening, entry.closing) for entry in entries if isinstance(entry, Closed)]
            landed += await self._land(connection, closed)
            self._offsets[segment] = end

    async def _read(self, segment: int, offset: int, *, closed_only: bool = False) -> tuple[list[Entry], int]:
        """In a thread, a little at a time: requests go on in this loop."""
        read = partial(journals.read, limit_bytes=_READ_BYTES, closed_only=closed_only)
        return await asyncio.to_thread(read, self._journal.directory, segment, offset)

    async def _recover(self, connection: asyncpg.Connection) -> int:
        """Settle what a process before us left open at its last progress, then forget its segments."""
        landed = 0
        still_open: dict[tuple[int, int], Opening] = {}
        progress: dict[tuple[int, int], Progress] = {}
        for segment in self._journal.inherited:
            offset = 0
            while True:
                entries, end = await self._read(segment, offset)
                if end == offset:
                    break
                offset = end
                closed: list[JsonObject] = []
                for entry in entries:
                    if isinstance(entry, Opening):
                        still_open[entry.segment, entry.sequence] = entry
                    elif isinstance(entry, Progress):
                        progress[entry.segment, entry.sequence] = entry
                    else:
                        still_open.pop((entry.opening.segment, entry.opening.sequence), None)
                        closed.append(row(self._gateway, entry.opening, entry.closing))
                landed += await self._land(connection, closed)
        landed += await self._land(connection, [self._settled(o, progress.get(key)) for key, o in still_open.items()])
        for segment in self._journal.inherited:
            await asyncio.to_thread(journals.drop, self._journal.directory, segment)
        if still_open:
            log.warning("settled %d requests that a gateway process before this one left open", len(still_open))
        return landed

    def _settled(self, opening: Opening, last: Progress | None) -> JsonObject:
        if last is None:
            return row(self._gateway, opening, settled_after_crash(opening, prompt=0, completion=0, at=opening.started_at))
        closing = settled_after_crash(opening, prompt=last.prompt_tokens, completion=last.completion_tokens, at=last.at)
        return row(self._gateway, opening, closing)

    async def _land(self, connection: asyncpg.Connection, rows: list[JsonObject]) -> int:
        landed = 0
        for start in range(0, len(rows), BATCH_ROWS):
            batch = rows[start : start + BATCH_ROWS]
            for day in {date.fromisoformat(str(values["day"])) for values in batch} - self._days:
                await ensure_day(connection, day)
                self._days.add(day)
            landed += int(await connection.fetchval(LAND, json.dumps(batch).decode()) or 0)
        return landed


async def ensure_day(connection: asyncpg.Connection, day: date) -> None:
    """Make the day's partition when it is missing. Built aside and attached, so readers are not blocked."""
    name = f"usage_record_{day:%Y%m%d}"
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _PARTITION_LOCK)
        if await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", name):
            return
        await connection.execute(f"CREATE TABLE {name} (LIKE usage_record INCLUDING ALL)")
        await connection.execute(
            f"ALTER TABLE usage_record ATTACH PARTITION {name} FOR VALUES FROM ('{day}') TO ('{day + timedelta(days=1)}')"
        )
