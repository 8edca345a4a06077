"""From the journal into PostgreSQL: batches land once, whatever happens, and raise the hourly sums for new rows only.

The one rule: a batch is one statement, so record and sum cannot part; a batch landed twice changes nothing. All of
metering's SQL stands here.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import date, timedelta
from functools import partial
from typing import Any

import asyncpg

from controlplane.core import json
from controlplane.core.ids import Kind, new_id
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
    is_estimated boolean, is_billable boolean, attempts int, first_token_ms bigint, served_model text)
), priced AS (
  SELECT b.*, CASE WHEN NOT is_billable OR p.model IS NULL THEN 0 ELSE p.request + ceil((
    greatest(0, b.prompt_tokens - b.cached_tokens) * p.prompt::numeric + b.cached_tokens * coalesce(p.cached, p.prompt)::numeric
    + b.completion_tokens * p.completion::numeric) / 1000000)::bigint END AS cost_micros
  FROM batch b
  LEFT JOIN LATERAL (
    SELECT * FROM price WHERE price.model IN (b.served_model, '*') AND valid_from <= b.started_at
    ORDER BY price.model = '*', valid_from DESC LIMIT 1) p ON true
), landed AS (
  INSERT INTO usage_record (
    day, gateway, segment, sequence, started_at, ended_at, project_id, key_id, model, endpoint_id, replica_id,
    request_id, path, is_stream, outcome, status, prompt_tokens, completion_tokens, cached_tokens, is_estimated,
    is_billable, attempts, first_token_ms, served_model, cost_micros)
  SELECT
    day, gateway, segment, sequence, started_at, ended_at, project_id, key_id, model, endpoint_id, replica_id,
    request_id, path, is_stream, outcome, status, prompt_tokens, completion_tokens, cached_tokens, is_estimated,
    is_billable, attempts, first_token_ms, served_model, cost_micros
  FROM priced
  ON CONFLICT DO NOTHING
  RETURNING *
), summed AS (
  INSERT INTO usage_hour AS u (
    hour, project_id, key_id, model, requests, prompt_tokens, completion_tokens, cached_tokens, cost_micros,
    estimated_requests, unbilled_requests)
  SELECT
    date_trunc('hour', started_at, 'UTC'), project_id, key_id, model, count(*),
    coalesce(sum(prompt_tokens) FILTER (WHERE is_billable), 0),
    coalesce(sum(completion_tokens) FILTER (WHERE is_billable), 0),
    coalesce(sum(cached_tokens) FILTER (WHERE is_billable), 0),
    sum(cost_micros), count(*) FILTER (WHERE is_estimated), count(*) FILTER (WHERE NOT is_billable)
  FROM landed
  GROUP BY 1, 2, 3, 4
  ORDER BY 1, 2, 3, 4
  ON CONFLICT (hour, project_id, key_id, model) DO UPDATE SET
    requests = u.requests + excluded.requests,
    prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
    completion_tokens = u.completion_tokens + excluded.completion_tokens,
    cached_tokens = u.cached_tokens + excluded.cached_tokens,
    cost_micros = u.cost_micros + excluded.cost_micros,
    estimated_requests = u.estimated_requests + excluded.estimated_requests,
    unbilled_requests = u.unbilled_requests + excluded.unbilled_requests
), by_budget AS (
  SELECT key_id, k.project_id, k.name, budget_period AS period, token_budget, token_budget_soft,
    money_budget_micros, money_budget_soft_micros,
    CASE budget_period WHEN 'total' THEN to_timestamp(0) ELSE date_trunc(budget_period, started_at, 'UTC') END AS period_start,
    coalesce(sum(prompt_tokens + completion_tokens) FILTER (WHERE is_billable), 0) AS tokens, sum(cost_micros) AS money_micros,
    coalesce(sum(prompt_tokens + completion_tokens) FILTER (WHERE is_billable AND segment >= $2), 0) AS held_tokens,
    coalesce(sum(cost_micros) FILTER (WHERE segment >= $2), 0) AS held_micros, min(gateway) AS gateway
  FROM landed JOIN key k ON k.id = key_id AND (token_budget IS NOT NULL OR money_budget_micros IS NOT NULL)
  GROUP BY k.id, landed.key_id, period_start
  ORDER BY landed.key_id, period_start
), used AS (
  INSERT INTO budget_use AS u (key_id, period, period_start, tokens, money_micros)
  SELECT key_id, period, period_start, tokens, money_micros FROM by_budget
  ON CONFLICT (key_id, period, period_start) DO UPDATE SET
    tokens = u.tokens + excluded.tokens, money_micros = u.money_micros + excluded.money_micros
  RETURNING *
), let_go AS (
  UPDATE budget_hold h SET
    tokens = greatest(0, h.tokens - b.held_tokens), money_micros = greatest(0, h.money_micros - b.held_micros)
  FROM used JOIN by_budget b USING (key_id, period, period_start)
  WHERE h.gateway = b.gateway AND h.since_segment = $2
    AND h.key_id = used.key_id AND h.period = used.period AND h.period_start = used.period_start
)
SELECT (SELECT count(*) FROM landed) AS landed, coalesce((
  SELECT jsonb_agg(jsonb_build_object('key', key_id, 'project', b.project_id, 'name', b.name, 'period', period,
    'start', extract(epoch FROM period_start), 'tokens', u.tokens, 'money_micros', u.money_micros, 'told', u.told, 'reached',
    CASE WHEN u.tokens >= token_budget OR u.money_micros >= money_budget_micros THEN 2
         WHEN u.tokens >= token_budget_soft OR u.money_micros >= money_budget_soft_micros THEN 1 ELSE 0 END))
  FROM used u JOIN by_budget b USING (key_id, period, period_start)), '[]') AS budgets
"""

TOLD = """
UPDATE budget_use SET told = $4 WHERE key_id = $1 AND period = $2 AND period_start = to_timestamp($3) AND told < $4
RETURNING told
"""

TELL = "INSERT INTO event (id, kind, project_id, subject_kind, subject_id, body) VALUES ($1, $2, $3, 'key', $4, $5)"

FORGET_HOLDS = "DELETE FROM budget_hold WHERE gateway = $1 AND since_segment < $2"

_PARTITION_LOCK = 0x0BED_0001


class Lander:
    """Carries one journal into the database; keeps nothing in memory but where it stands in each segment."""

    def __init__(self, journal: Journal, gateway: str) -> None:
        self._journal = journal
        self._gateway = gateway
        self._offsets: dict[int, int] = {}
        self._days: set[date] = set()
        self._since = journal.open_segment
        self._is_recovered = False

    async def run_once(self, connection: asyncpg.Connection) -> int:
        """Land what there is; returns how many records were new. Raises what asyncpg raises: nothing is lost then."""
        landed = 0
        if not self._is_recovered:
            landed += await self._recover(connection)
            await connection.execute(FORGET_HOLDS, self._gateway, self._since)
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
            async with connection.transaction():
                row = await connection.fetchrow(LAND, json.dumps(batch).decode(), self._since)
                assert row is not None
                landed += int(row["landed"])
                await _tell_budgets(connection, json.loads(row["budgets"]))
        return landed


async def _tell_budgets(connection: asyncpg.Connection, budgets: Any) -> None:
    """An event when a budget's soft limit is reached, and one when it is spent: once each period."""
    for budget in budgets:
        level = budget["reached"]
        if level <= budget["told"]:
            continue
        if await connection.fetchval(TOLD, budget["key"], budget["period"], budget["start"], level):
            body = {name: budget[name] for name in ("name", "period", "tokens", "money_micros")}
            kind = "key.budget_spent" if level == 2 else "key.budget_soft_limit"
            arguments = (new_id(Kind.EVENT), kind, budget["project"], budget["key"], json.dumps(body).decode())
            await connection.execute(TELL, *arguments)


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
