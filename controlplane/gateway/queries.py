"""The gateway's SQL, all of it. Raw asyncpg, checked against the schema by a test.

The one rule: nothing here runs while a request waits, except the shared look for a key or model that is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import asyncpg

from controlplane.core import json
from controlplane.gateway.directory import (
    Affinity,
    KeyEntry,
    Match,
    ModelLimits,
    ReplicaEntry,
    RouteEntry,
    Rule,
    Target,
    Timeouts,
)
from controlplane.gateway.retry import DEFAULT_POLICY, RetryPolicy


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
       requests_per_minute, tokens_per_minute, model_limits, max_concurrent, allowed_cidrs, scopes, labels
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

REPORT_USE = """
WITH ended AS (DELETE FROM replica_use WHERE gateway = $1 AND NOT replica_id = ANY($2::text[]))
INSERT INTO replica_use (gateway, replica_id) SELECT $1, unnest($2::text[]) ON CONFLICT DO NOTHING
"""

PRESENCE = """
WITH told AS (INSERT INTO gateway_presence VALUES ($1, now()) ON CONFLICT (gateway) DO UPDATE SET at = now())
SELECT count(*) + 1 FROM gateway_presence WHERE gateway <> $1 AND at > now() - interval '15 seconds'
"""

LEAVE = "DELETE FROM gateway_presence WHERE gateway = $1"

ENDPOINTS = """
SELECT e.id, e.name, e.spec, e.replicas AS wanted, e.autoscale, e.max_in_flight,
       (SELECT coalesce(jsonb_agg(jsonb_build_array(p.id, p.base_url) ORDER BY p.id), '[]')
        FROM replica p WHERE p.endpoint_id = e.id AND p.state = 'ready') AS replicas
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


async def forget_load(connection: asyncpg.Connection, instance: str) -> None:
    await connection.execute(FORGET_LOAD, instance)


async def versions(connection: asyncpg.Connection) -> dict[str, int]:
    """The present version of each topic; a topic without a row has never changed."""
    return {row["topic"]: row["version"] for row in await connection.fetch(VERSIONS)}


async def report_use(connection: asyncpg.Connection, gateway: str, replica_ids: list[str]) -> None:
    """Write down at which replicas answers are open here, and at no others: those may not be taken away yet."""
    await connection.execute(REPORT_USE, gateway, replica_ids)


async def show_presence(connection: asyncpg.Connection, gateway: str) -> int:
    """Say that this gateway is alive; how many are, this one included."""
    return int(await connection.fetchval(PRESENCE, gateway) or 1)


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
            model_limits=_model_limits(row["model_limits"]),
            max_concurrent=row["max_concurrent"],
            allowed_cidrs=None if row["allowed_cidrs"] is None else tuple(row["allowed_cidrs"]),
            scopes=None if row["scopes"] is None else frozenset(row["scopes"]),
            labels=_labels(row["labels"]),
        )
        for row in await connection.fetch(KEYS)
    }


def _model_limits(text: str) -> dict[str, ModelLimits]:
    limits: Any = json.loads(text)
    return {model: ModelLimits(**of_model) for model, of_model in limits.items()}


def _labels(text: str) -> dict[str, str]:
    labels: Any = json.loads(text)
    return labels


async def routes(connection: asyncpg.Connection) -> dict[str, dict[str, RouteEntry]]:
    """Routes by project and name, all of one moment."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        rows = await connection.fetch(ROUTES)
        targets = await connection.fetch(TARGETS)
        endpoints = {row["id"]: row for row in await connection.fetch(ENDPOINTS)}
    placed: dict[tuple[str, str | None], list[asyncpg.Record]] = {}
    for target in targets:
        if target["endpoint_id"] in endpoints:
            placed.setdefault((target["route_id"], target["rule"]), []).append(target)
    found: dict[str, dict[str, RouteEntry]] = {}
    for row in rows:
        found.setdefault(row["project_id"], {})[row["name"]] = _route(row, placed, endpoints)
    return found


def _route(row: asyncpg.Record, placed: dict[Any, list[asyncpg.Record]], endpoints: dict[str, asyncpg.Record]) -> RouteEntry:
    timeouts: Any = json.loads(row["timeouts"])
    retry: Any = json.loads(row["retry"])
    affinity: Any = json.loads(row["affinity"])

    def targets(rule: str | None) -> tuple[Target, ...]:
        return tuple(_target(target, endpoints) for target in placed.get((row["id"], rule), ()))

    rules: Any = json.loads(row["rules"])
    entry = RouteEntry(
        id=row["id"],
        name=row["name"],
        created=row["created"],
        targets=targets(None),
        rules=tuple(Rule(name=rule["name"], match=_match(rule["match"]), targets=targets(rule["name"])) for rule in rules),
        retry=RetryPolicy(
            max_attempts=retry.get("max_attempts", DEFAULT_POLICY.max_attempts),
            backoff_seconds=retry.get("backoff_ms", 0) / 1000,
        ),
        affinity=Affinity(**{**affinity, "header": affinity.get("header", "x-session-id").encode()}),
        timeouts=Timeouts(**{name: float(seconds) for name, seconds in timeouts.items()}),
    )
    return replace(entry, **_shown(entry, endpoints))


def _shown(entry: RouteEntry, endpoints: dict[str, asyncpg.Record]) -> dict[str, Any]:
    """Whether waiting may help, and what `/v1/models` says of the route."""
    every = list(entry.every_target())
    meta: dict[str, object] = {"state": "ready" if any(target.replicas for target in every) else "not_ready"}
    specs: list[Any] = [json.loads(endpoints[target.endpoint_id]["spec"]) for target in every]
    if contexts := [spec["context_tokens"] for spec in specs if "context_tokens" in spec]:
        meta["context_tokens"] = min(contexts)
    return {
        "is_starting": any(target.is_autoscaled or endpoints[target.endpoint_id]["wanted"] for target in every),
        "meta": meta,
    }


def _match(given: dict[str, Any]) -> Match:
    return Match(
        key_labels=tuple(given.get("key_labels", {}).items()),
        headers=tuple((name.lower().encode(), value.encode()) for name, value in given.get("headers", {}).items()),
        modalities=frozenset(given.get("modalities", ())),
        is_stream=given.get("stream"),
        least_prompt_tokens=given.get("min_prompt_tokens"),
        most_prompt_tokens=given.get("max_prompt_tokens"),
    )


def _target(row: asyncpg.Record, endpoints: dict[str, asyncpg.Record]) -> Target:
    target = _alone(endpoints[row["endpoint_id"]], row["weight"])
    fallback = endpoints.get(row["fallback_endpoint_id"])
    return target if fallback is None else replace(target, fallback=_alone(fallback, 0))


def _alone(endpoint: asyncpg.Record, weight: int) -> Target:
    spec: Any = json.loads(endpoint["spec"])
    replicas: Any = json.loads(endpoint["replicas"])
    autoscale: Any = json.loads(endpoint["autoscale"]) if endpoint["autoscale"] else None
    return Target(
        endpoint_id=endpoint["id"],
        name=endpoint["name"],
        served_model_id=spec["served_model_id"],
        weight=weight,
        has_continuous_usage=bool(spec.get("engine", {}).get("has_continuous_usage")),
        is_autoscaled=autoscale is not None,
        max_in_flight=endpoint["max_in_flight"],
        places=math.ceil(autoscale["target_in_flight"]) if autoscale else 0,
        replicas=tuple(ReplicaEntry(id=replica, base_url=url) for replica, url in replicas),
    )
