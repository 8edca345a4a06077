"""What the gateway knows: keys by the hash of their secret, routes by project and public name, replicas that are ready.

The one rule: a `Directory` is a snapshot and never changes; the keeper puts a new one in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """`models` None = every model of the project; `expires_at` in seconds since the epoch."""

    id: str
    project_id: str
    models: frozenset[str] | None = None
    expires_at: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def is_valid(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEntry:
    """A replica that answered its probe. `base_url` never leaves the gateway; clients see `short_id`."""

    id: str
    base_url: str

    @property
    def short_id(self) -> str:
        return self.id[-8:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. `first_token` counts from the request's arrival at the replica, `idle` between two chunks."""

    connect: float = 2.0
    first_token: float = 300.0
    idle: float = 120.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One endpoint behind a route. `has_continuous_usage`: the engine can send running totals in every chunk."""

    endpoint_id: str
    served_model_id: str
    weight: int
    has_continuous_usage: bool
    replicas: tuple[ReplicaEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEntry:
    """A public model name of one project. `is_starting`: replicas are wanted, so waiting may help. `meta` is what
    `/v1/models` shows beside OpenAI's fields.
    """

    name: str
    created: int
    targets: tuple[Target, ...]
    timeouts: Timeouts = Timeouts()
    is_starting: bool = False
    meta: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return any(target.replicas for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    keys: Mapping[bytes, KeyEntry] = field(default_factory=dict)
    routes: Mapping[str, Mapping[str, RouteEntry]] = field(default_factory=dict)

    def key(self, secret: bytes) -> KeyEntry | None:
        return self.keys.get(hashlib.sha256(secret).digest())

    def visible(self, key: KeyEntry) -> list[RouteEntry]:
        """The routes this key may call, by name."""
        routes = self.routes.get(key.project_id, {})
        return [routes[name] for name in sorted(routes) if key.may_use(name)]

    def route(self, key: KeyEntry, name: str) -> RouteEntry | None:
        """None when there is none or this key may not see it: the caller cannot tell which."""
        if not key.may_use(name):
            return None
        return self.routes.get(key.project_id, {}).get(name)
