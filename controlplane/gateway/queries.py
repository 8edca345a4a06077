"""The gateway's SQL, all of it. Raw asyncpg, checked against the schema by a test.

The one rule: nothing here runs while a request waits, except the shared look for a key or model that is not known yet.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from controlplane.core import json
from controlplane.gateway.directory import KeyEntry, ReplicaEntry, RouteEntry, Target, Timeouts

CHANNEL = "bedplate_gateway"

VERSIONS = "SELECT topic, version FROM gateway_version"

KEYS = """
SELECT id, project_id, secret_sha256, models, extract(epoch FROM expires_at)::float8 AS expires_at,
       requests_per_minute, tokens_per_minute
FROM key
WHERE expires_at IS NULL OR expires_at > now()
"""

ROUTES = """
SELECT r.project_id, r.name, extract(epoch FROM r.created_at)::bigint AS created, r.timeouts,
       coalesce(jsonb_agg(jsonb_build_object(
         'endpoint_id', e.id, 'weight', t.weight, 'spec', e.spec, 'wanted', e.replicas,
         'replicas', (SELECT coalesce(jsonb_agg(jsonb_build_array(p.id, p.base_url) ORDER BY p.id), '[]')
                      FROM replica p WHERE p.endpoint_id = e.id AND p.state = 'ready')
       ) ORDER BY e.id) FILTER (WHERE e.id IS NOT NULL), '[]') AS targets
FROM route r
LEFT JOIN route_target t ON t.route_id = r.id
LEFT JOIN endpoint e ON e.id = t.endpoint_id AND e.state = 'active'
GROUP BY r.id
"""


async def versions(connection: asyncpg.Connection) -> dict[str, int]:
    """The present version of each topic; a topic without a row has never changed."""
    return {row["topic"]: row["version"] for row in await connection.fetch(VERSIONS)}


async def keys(connection: asyncpg.Connection) -> dict[bytes, KeyEntry]:
    return {
        row["secret_sha256"]: KeyEntry(
            id=row["id"],
            project_id=row["project_id"],
            models=None if row["models"] is None else frozenset(row["models"]),
            expires_at=row["expires_at"],
            requests_per_minute=row["requests_per_minute"],
            tokens_per_minute=row["tokens_per_minute"],
        )
        for row in await connection.fetch(KEYS)
    }


async def routes(connection: asyncpg.Connection) -> dict[str, dict[str, RouteEntry]]:
    """Routes by project and name."""
    found: dict[str, dict[str, RouteEntry]] = {}
    for row in await connection.fetch(ROUTES):
        found.setdefault(row["project_id"], {})[row["name"]] = _route(row)
    return found


def _route(row: asyncpg.Record) -> RouteEntry:
    timeouts: Any = json.loads(row["timeouts"])
    targets: Any = json.loads(row["targets"])
    meta: dict[str, object] = {"state": "ready" if any(target["replicas"] for target in targets) else "not_ready"}
    if contexts := [target["spec"]["context_tokens"] for target in targets if "context_tokens" in target["spec"]]:
        meta["context_tokens"] = min(contexts)
    return RouteEntry(
        name=row["name"],
        created=row["created"],
        targets=tuple(_target(target) for target in targets),
        timeouts=Timeouts(**{name: float(seconds) for name, seconds in timeouts.items()}),
        is_starting=any(target["wanted"] for target in targets),
        meta=meta,
    )


def _target(target: dict[str, Any]) -> Target:
    spec = target["spec"]
    return Target(
        endpoint_id=target["endpoint_id"],
        served_model_id=spec["served_model_id"],
        weight=target["weight"],
        has_continuous_usage=bool(spec.get("engine", {}).get("has_continuous_usage")),
        replicas=tuple(ReplicaEntry(id=replica_id, base_url=base_url) for replica_id, base_url in target["replicas"]),
    )
