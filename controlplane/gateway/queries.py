"""The gateway's SQL, all of it. Raw asyncpg, checked against the schema by a test.

The one rule: nothing here runs while a request waits, except the shared look for a key or model that is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import asyncpg

from controlplane.gateway.directory import Budget, KeyEntry, Offer, RouteEntry
from controlplane.gateway.entry import (
    Known,
    Unseal,
    budget_of,
    labels_of,
    model_limits_of,
    offer_of,
    price_of,
    provider_of,
    route_of,
)
from controlplane.gateway.traffic import Seen
from controlplane.gateway.waiting import BANDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One endpoint's last second at this gateway; counts are means weighted by time."""

    endpoint_id: str
    in_flight: float
    queued: float
    requests_per_second: float
    last_end_at: datetime | None


CHANNEL = "bedplate_gateway"

VERSIONS = "SELECT topic, version FROM gateway_version"

KEYS = """
SELECT id, project_id, secret_sha256, models, extract(epoch FROM expires_at)::float8 AS expires_at,
       requests_per_minute, tokens_per_minute, model_limits, max_concurrent, allowed_cidrs, scopes, labels,
       token_budget, money_budget_micros, token_budget_soft, money_budget_soft_micros, budget_period,
       priority
FROM key
WHERE expires_at IS NULL OR expires_at > now()
"""

ROUTES = """
SELECT id, project_id, name, extract(epoch FROM created_at)::bigint AS created, timeouts, retry, affinity, rules FROM route
"""

TARGETS = """
SELECT route_id, NULL AS rule, endpoint_id, weight, fallback_endpoint_id FROM route_target
UNION ALL
SELECT route_id, rule, endpoint_id, weight, fallback_endpoint_id FROM route_rule_target
ORDER BY 1, 3
"""

PROVIDERS = "SELECT id, name, kind, base_url, sealed_key, models, project_ids FROM provider ORDER BY name"

PROVIDER_TARGETS = "SELECT route_id, rule, fallback_of, provider_id, model, weight FROM route_provider ORDER BY 1, 4, 5"

REPORT_USE = """
WITH ended AS (DELETE FROM replica_use WHERE gateway = $1 AND NOT replica_id = ANY($2::text[]))
INSERT INTO replica_use (gateway, replica_id) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING
"""

PRESENCE = """
WITH told AS (
  INSERT INTO gateway_presence (gateway, at, routes) VALUES ($1, now(), $2)
  ON CONFLICT (gateway) DO UPDATE SET at = excluded.at, routes = excluded.routes)
SELECT count(*) + 1 FROM gateway_presence WHERE gateway <> $1 AND at > now() - interval '15 seconds'
"""

LEAVE = "DELETE FROM gateway_presence WHERE gateway = $1"

ENDPOINTS = """
SELECT e.id, e.name, e.spec, e.replicas AS wanted, e.autoscale, e.max_in_flight, e.revision,
       e.rollout IS NOT NULL AS is_rolling, (e.rollout->>'share')::float8 AS share,
       (SELECT coalesce(jsonb_agg(jsonb_build_array(p.id, p.base_url, p.revision) ORDER BY p.id), '[]')
        FROM replica p WHERE p.endpoint_id = e.id AND p.state = 'ready') AS replicas,
       (SELECT jsonb_agg(jsonb_build_array(
          r.number, r.model, r.spec->>'served_model_id', r.spec#>'{engine,has_continuous_usage}'))
        FROM endpoint_revision r WHERE r.endpoint_id = e.id AND (r.number = e.revision OR EXISTS (
          SELECT FROM replica p WHERE p.endpoint_id = e.id AND p.revision = r.number))) AS revisions
FROM endpoint e
WHERE e.state = 'active'
"""


TELL_LOAD = """
INSERT INTO endpoint_load (gateway, endpoint_id, in_flight, queued, requests_per_second, last_end_at, at)
SELECT $1, *, now() FROM unnest($2::text[], $3::float8[], $4::float8[], $5::float8[], $6::timestamptz[])
ON CONFLICT (gateway, endpoint_id) DO UPDATE SET
  in_flight = excluded.in_flight, queued = excluded.queued, requests_per_second = excluded.requests_per_second,
  last_end_at = coalesce(excluded.last_end_at, endpoint_load.last_end_at), at = excluded.at
"""

TELL_TRAFFIC = """
INSERT INTO revision_traffic (gateway, endpoint_id, revision, requests, failures, ttft_counts, at)
VALUES ($1, $2, $3, $4, $5, $6, now())
ON CONFLICT (gateway, endpoint_id, revision) DO UPDATE SET
  requests = excluded.requests, failures = excluded.failures, ttft_counts = excluded.ttft_counts, at = excluded.at
"""

HAVE_BUDGET = "INSERT INTO budget_use (key_id, period, period_start) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"

LOCK_BUDGET = "SELECT FROM budget_use WHERE key_id = $1 AND period = $2 AND period_start = $3 FOR UPDATE"

LOOK_AT_BUDGET = """
SELECT k.token_budget, k.money_budget_micros, k.token_budget_soft, k.money_budget_soft_micros,
       u.tokens + coalesce(h.tokens, 0) AS tokens, u.money_micros + coalesce(h.money_micros, 0) AS money_micros
FROM budget_use u
JOIN key k ON k.id = u.key_id
CROSS JOIN LATERAL (
  SELECT sum(tokens)::bigint AS tokens, sum(money_micros)::bigint AS money_micros FROM budget_hold
  WHERE key_id = $1 AND period = $2 AND period_start = $3 AND at > now() - interval '1 hour') h
WHERE u.key_id = $1 AND u.period = $2 AND u.period_start = $3
"""

HOLD_BUDGET = """
INSERT INTO budget_hold AS h (gateway, since_segment, key_id, period, period_start, tokens, money_micros, at)
VALUES ($1, $2, $3, $4, $5, $6, $7, now())
ON CONFLICT (gateway, since_segment, key_id, period, period_start) DO UPDATE SET
  tokens = h.tokens + excluded.tokens, money_micros = h.money_micros + excluded.money_micros, at = now()
"""

TOUCH_BUDGETS = "UPDATE budget_hold SET at = now() WHERE gateway = $1 AND since_segment = $2"

DROP_BUDGETS = "DELETE FROM budget_hold WHERE gateway = $1 AND since_segment = $2"

PRICES = """
SELECT DISTINCT ON (model) model, prompt, coalesce(cached, prompt) AS cached, completion, request FROM price
WHERE valid_from <= now() ORDER BY model, valid_from DESC
"""

FORGET_LOAD = "DELETE FROM endpoint_load WHERE gateway = $1"


async def tell_load(connection: asyncpg.Connection, instance: str, rows: Sequence[Load]) -> None:
    """Write down the last second of each endpoint."""
    await connection.execute(
        TELL_LOAD,
        instance,
        [row.endpoint_id for row in rows],
        [row.in_flight for row in rows],
        [row.queued for row in rows],
        [row.requests_per_second for row in rows],
        [row.last_end_at for row in rows],
    )


async def tell_traffic(connection: asyncpg.Connection, instance: str, rows: Sequence[tuple[str, int, Seen]]) -> None:
    """Write down what was seen of each revision that is rolled out."""
    for endpoint_id, revision, seen in rows:
        await connection.execute(TELL_TRAFFIC, instance, endpoint_id, revision, seen.requests, seen.failures, seen.ttft_counts)


async def forget_load(connection: asyncpg.Connection, instance: str) -> None:
    await connection.execute(FORGET_LOAD, instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What was taken of a budget; `is_soft`: its soft limit is reached."""

    tokens: int = 0
    money_micros: int = 0
    is_soft: bool = False


async def take_budget(
    connection: asyncpg.Connection, who: tuple[str, int], key_id: str, of: tuple[Budget, datetime], need: tuple[int, int]
) -> Chunk:
    """At least `need` (tokens, millionths of money) where there is so much, else what is left; usually 1 % of what is left."""
    budget, start = of
    async with connection.transaction():
        await connection.execute(HAVE_BUDGET, key_id, budget.period, start)
        # A statement of its own: holds are read as they are when the lock is ours, not as they were when we began to wait.
        await connection.execute(LOCK_BUDGET, key_id, budget.period, start)
        row = await connection.fetchrow(LOOK_AT_BUDGET, key_id, budget.period, start)
        if row is None:  # the key is gone
            return Chunk()
        tokens = _chunk(row["token_budget"], row["tokens"], need[0])
        micros = _chunk(row["money_budget_micros"], row["money_micros"], need[1])
        await connection.execute(HOLD_BUDGET, *who, key_id, budget.period, start, tokens, micros)
    is_soft = (row["token_budget_soft"] or math.inf) <= row["tokens"]
    is_soft |= (row["money_budget_soft_micros"] or math.inf) <= row["money_micros"]
    return Chunk(tokens=tokens, money_micros=micros, is_soft=is_soft)


def _chunk(limit: int | None, gone: int, need: int) -> int:
    left = max(0, (limit or 0) - gone)
    return 0 if limit is None else min(left, max(need, left // 100))


async def touch_budgets(connection: asyncpg.Connection, who: tuple[str, int]) -> None:
    await connection.execute(TOUCH_BUDGETS, *who)


async def drop_budgets(connection: asyncpg.Connection, who: tuple[str, int]) -> None:
    await connection.execute(DROP_BUDGETS, *who)


async def versions(connection: asyncpg.Connection) -> dict[str, int]:
    """The present version of each topic; a topic without a row has never changed."""
    return {row["topic"]: row["version"] for row in await connection.fetch(VERSIONS)}


async def report_use(connection: asyncpg.Connection, gateway: str, replica_ids: list[str]) -> None:
    """Write down at which replicas answers are open here, and at no others: those may not be taken away yet."""
    await connection.execute(REPORT_USE, gateway, replica_ids)


async def show_presence(connection: asyncpg.Connection, gateway: str, routes: int) -> int:
    """Say that this gateway is alive and by which version of the routes it goes; how many are alive, this one included."""
    return int(await connection.fetchval(PRESENCE, gateway, routes) or 1)


async def leave(connection: asyncpg.Connection, gateway: str) -> None:
    await connection.execute(LEAVE, gateway)


async def keys(connection: asyncpg.Connection) -> dict[bytes, KeyEntry]:
    return {
        row["secret_sha256"]: KeyEntry(
            id=row["id"],
            project_id=row["project_id"],
            models=None if row["models"] is None else frozenset(row["models"]),
            expires_at=row["expires_at"],
            requests_per_minute=row["requests_per_minute"],
            tokens_per_minute=row["tokens_per_minute"],
            model_limits=model_limits_of(row["model_limits"]),
            max_concurrent=row["max_concurrent"],
            allowed_cidrs=None if row["allowed_cidrs"] is None else tuple(row["allowed_cidrs"]),
            scopes=None if row["scopes"] is None else frozenset(row["scopes"]),
            labels=labels_of(row["labels"]),
            budget=budget_of(row),
            band=BANDS[row["priority"]],
        )
        for row in await connection.fetch(KEYS)
    }


async def routes(
    connection: asyncpg.Connection, unseal: Unseal | None = None
) -> tuple[dict[str, dict[str, RouteEntry]], dict[str, Offer]]:
    """Routes by project and name and what providers offer, all of one moment. Without `unseal` there are no providers."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await connection.fetch(ROUTES)
        targets = await connection.fetch(TARGETS)
        endpoints = {row["id"]: row for row in await connection.fetch(ENDPOINTS)}
        prices = {row["model"]: price_of(row) for row in await connection.fetch(PRICES)}
        providers = [] if unseal is None else await connection.fetch(PROVIDERS)
        outside = [] if unseal is None else await connection.fetch(PROVIDER_TARGETS)
    placed: dict[tuple[str, str | None], list[asyncpg.Record]] = {}
    for target in targets:
        if target["endpoint_id"] in endpoints:
            placed.setdefault((target["route_id"], target["rule"]), []).append(target)
    entries = {row["id"]: provider_of(row, unseal) for row in providers if unseal is not None}
    known = Known(endpoints, prices, entries, outside)
    found: dict[str, dict[str, RouteEntry]] = {}
    for row in rows:
        found.setdefault(row["project_id"], {})[row["name"]] = route_of(row, placed, known)
    return found, dict(offer_of(row, model, known) for row in providers for model in row["models"] if entries[row["id"]])
