"""Rows as the gateway knows them: keys, routes, targets, what providers offer. Pure but for opening the keys of providers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import asyncpg

from controlplane.core import json
from controlplane.gateway.directory import (
    Affinity,
    Budget,
    Match,
    ModelLimits,
    Offer,
    Price,
    ProviderEntry,
    ReplicaEntry,
    RouteEntry,
    Rule,
    Serving,
    Target,
    Timeouts,
)
from controlplane.gateway.retry import DEFAULT_POLICY, RetryPolicy

log = logging.getLogger(__name__)

Unseal = Callable[[bytes, str], bytes]


def budget_of(row: asyncpg.Record) -> Budget | None:
    if row["token_budget"] is None and row["money_budget_micros"] is None:
        return None
    return Budget(
        period=row["budget_period"],
        tokens=row["token_budget"],
        money_micros=row["money_budget_micros"],
        tokens_soft=row["token_budget_soft"],
        money_soft_micros=row["money_budget_soft_micros"],
    )


def model_limits_of(text: str) -> dict[str, ModelLimits]:
    limits: Any = json.loads(text)
    return {model: ModelLimits(**of_model) for model, of_model in limits.items()}


def labels_of(text: str) -> dict[str, str]:
    labels: Any = json.loads(text)
    return labels


def provider_of(row: asyncpg.Record, unseal: Unseal) -> ProviderEntry | None:
    try:
        key = unseal(row["sealed_key"], f"provider.key:{row['id']}").decode()
    except ValueError:
        log.exception("the key of the provider %s cannot be opened: it is left out", row["name"])
        return None
    return ProviderEntry(id=row["id"], name=row["name"], kind=row["kind"], base_url=row["base_url"], key=key)


def offer_of(row: asyncpg.Record, model: str, known: Known) -> tuple[str, Offer]:
    name = f"{row['name']}/{model}"
    target = _outside(known.providers[row["id"]], model, 1, known.prices)
    assert target is not None
    entry = RouteEntry(id=name, name=name, created=0, targets=(target,), meta={"state": "ready"})
    return name, Offer(route=entry, project_ids=None if row["project_ids"] is None else frozenset(row["project_ids"]))


def _outside(provider: ProviderEntry | None, model: str, weight: int, prices: dict[str, Price]) -> Target | None:
    """A provider's model as a target; its breaker is that of the provider's address."""
    if provider is None:
        return None
    name = f"{provider.name}/{model}"
    serving = Serving(served_model_id=model, model=name, price=prices.get(name, prices.get("*")))
    return Target(
        endpoint_id=f"{provider.id}/{model}",
        name=name,
        serving=serving,
        weight=weight,
        replicas=(ReplicaEntry(id=provider.id, base_url=provider.base_url, serving=serving),),
        provider=provider,
    )


@dataclass(frozen=True, slots=True)
class Known:
    """What targets are made of: endpoints by id, and prices in force by model."""

    endpoints: dict[str, asyncpg.Record]
    prices: dict[str, Price]
    providers: dict[str, ProviderEntry | None]
    outside: list[asyncpg.Record]

    def outside_of(self, route_id: str, rule: str, fallback_of: str = "") -> list[Target]:
        """The providers' models behind a route's rule, or behind one of its endpoints."""
        rows = [
            row for row in self.outside if (row["route_id"], row["rule"], row["fallback_of"]) == (route_id, rule, fallback_of)
        ]
        made = [_outside(self.providers.get(row["provider_id"]), row["model"], row["weight"], self.prices) for row in rows]
        return [target for target in made if target is not None]


def price_of(row: asyncpg.Record) -> Price:
    return Price(prompt=row["prompt"], cached=row["cached"], completion=row["completion"], request=row["request"])


def route_of(row: asyncpg.Record, placed: dict[Any, list[asyncpg.Record]], known: Known) -> RouteEntry:
    timeouts: Any = json.loads(row["timeouts"])
    retry: Any = json.loads(row["retry"])
    affinity: Any = json.loads(row["affinity"])

    def targets(rule: str | None) -> tuple[Target, ...]:
        inside = [_target(target, known) for target in placed.get((row["id"], rule), ())]
        return (*inside, *known.outside_of(row["id"], rule or ""))

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
    return replace(entry, **_shown(entry, known.endpoints))


def _shown(entry: RouteEntry, endpoints: dict[str, asyncpg.Record]) -> dict[str, Any]:
    """Whether waiting may help, and what `/v1/models` says of the route."""
    every = [target for target in entry.every_target() if target.provider is None]
    is_outside = len(every) < sum(1 for _ in entry.every_target())
    meta: dict[str, object] = {"state": "ready" if is_outside or any(target.replicas for target in every) else "not_ready"}
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


def _target(row: asyncpg.Record, known: Known) -> Target:
    target = _alone(known.endpoints[row["endpoint_id"]], row["weight"], known.prices)
    fallback = known.endpoints.get(row["fallback_endpoint_id"])
    if outside := known.outside_of(row["route_id"], row["rule"] or "", row["endpoint_id"]):
        return replace(target, fallback=outside[0])
    return target if fallback is None else replace(target, fallback=_alone(fallback, 0, known.prices))


def _alone(endpoint: asyncpg.Record, weight: int, prices: dict[str, Price]) -> Target:
    replicas: Any = json.loads(endpoint["replicas"])
    revisions: Any = json.loads(endpoint["revisions"])
    servings = {number: _serving(number, revision, prices) for number, *revision in revisions}
    autoscale: Any = json.loads(endpoint["autoscale"]) if endpoint["autoscale"] else None
    return Target(
        endpoint_id=endpoint["id"],
        name=endpoint["name"],
        serving=servings[endpoint["revision"]],
        weight=weight,
        is_autoscaled=autoscale is not None,
        max_in_flight=endpoint["max_in_flight"],
        places=math.ceil(autoscale["target_in_flight"]) if autoscale else 0,
        is_rolling=endpoint["is_rolling"],
        share=endpoint["share"],
        replicas=tuple(ReplicaEntry(id=replica, base_url=url, serving=servings[number]) for replica, url, number in replicas),
    )


def _serving(number: int, revision: list[Any], prices: dict[str, Price]) -> Serving:
    model, served_model_id, has_continuous_usage = revision
    return Serving(
        served_model_id=served_model_id,
        revision=number,
        model=model,
        price=prices.get(model, prices.get("*")),
        has_continuous_usage=bool(has_continuous_usage),
    )
