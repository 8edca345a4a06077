"""What the gateway knows: keys by the hash of their secret, routes by project and public name, replicas that are ready.

The one rule: a `Directory` is a snapshot and never changes; the keeper puts a new one in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address

from controlplane.gateway.retry import DEFAULT_POLICY, RetryPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Of one key for one model, a minute; None = as for the key."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Of one key for a `period` (`total`, `day`, `month`; UTC); None = no such limit. A soft limit only tells."""

    period: str = "total"
    tokens: int | None = None
    money_micros: int | None = None
    tokens_soft: int | None = None
    money_soft_micros: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Millionths of the currency for a million tokens, and for a request."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    request: int = 0

    def of(self, prompt: int, cached: int, completion: int) -> int:
        """What they cost, in millionths; rounded up, as metering does."""
        tokens = max(0, prompt - cached) * self.prompt + cached * self.cached + completion * self.completion
        return self.request - (-tokens // 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    """`models` None = every model of the project; `expires_at` in seconds since the epoch; `band`: 0 low, 1 normal, 2 high."""

    id: str
    project_id: str
    models: frozenset[str] | None = None
    expires_at: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    model_limits: Mapping[str, ModelLimits] = field(default_factory=dict)
    max_concurrent: int | None = None
    allowed_cidrs: tuple[IPv4Network | IPv6Network, ...] | None = None
    scopes: frozenset[str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    budget: Budget | None = None
    band: int = 1

    def is_valid(self, now: float) -> bool:
        return self.expires_at is None or now < self.expires_at

    def may_come_from(self, address: str) -> bool:
        """Whether the client's address is among the allowed ones; an address that is none (a UNIX socket) is not."""
        if self.allowed_cidrs is None:
            return True
        try:
            client = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(client, "ipv4_mapped", None)
        return any((mapped or client) in cidr for cidr in self.allowed_cidrs)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What replicas of one revision serve. `has_continuous_usage`: the engine can send running totals in every chunk."""

    served_model_id: str
    revision: int = 1
    model: str = ""
    price: Price | None = None
    has_continuous_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEntry:
    """A replica that answered its probe. `base_url` never leaves the gateway; clients see `short_id`."""

    id: str
    base_url: str
    serving: Serving

    @property
    def short_id(self) -> str:
        return self.id[-8:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. `queue`: in the waiting room; `first_token` counts from arrival at the replica, `idle` between two chunks."""

    connect: float = 2.0
    queue: float = 300.0
    first_token: float = 300.0
    idle: float = 120.0
    total: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """A provider outside: the plug-in that speaks to it, and its key."""

    id: str
    name: str
    kind: str
    base_url: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One endpoint behind a route. `serving`: of its present revision; while that is rolled out (`is_rolling`), its replicas
    get `share` percent of the requests (None: as many as they are).

    `fallback` takes the requests that this one's replicas cannot: none is there, or they fail. `max_in_flight` is a replica's
    limit (0: none), `places` how many of those who wait go to one replica at a time (0: all).
    """

    endpoint_id: str
    name: str = ""
    serving: Serving
    weight: int
    replicas: tuple[ReplicaEntry, ...]
    fallback: Target | None = None
    provider: ProviderEntry | None = None
    is_autoscaled: bool = False
    max_in_flight: int = 0
    places: int = 0
    is_rolling: bool = False
    share: float | None = None

    @property
    def can_wait_for(self) -> bool:
        """Whether a request may wait until a replica is there or has room."""
        return self.is_autoscaled or self.max_in_flight > 0 or self.is_rolling


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a request must be for a rule; None and empty match everything. `headers`: lower-case name → exact value.

    `least_prompt_tokens` and `most_prompt_tokens` are compared with the estimate (four bytes a token).
    """

    key_labels: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    modalities: frozenset[str] = frozenset()
    is_stream: bool | None = None
    least_prompt_tokens: int | None = None
    most_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The first rule that matches decides; a route's own targets are the last rule."""

    name: str
    match: Match
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """`prefix`: requests that begin alike go to the same replica; `session`: those with the same `header`."""

    kind: str = "none"
    header: bytes = b"x-session-id"
    prefix_bytes: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEntry:
    """A public model name of one project. `is_starting`: replicas are wanted, so waiting may help. `meta` is what
    `/v1/models` shows beside OpenAI's fields.
    """

    id: str = ""
    name: str
    created: int
    targets: tuple[Target, ...]
    rules: tuple[Rule, ...] = ()
    retry: RetryPolicy = DEFAULT_POLICY
    affinity: Affinity = Affinity()
    timeouts: Timeouts = Timeouts()
    is_starting: bool = False
    meta: Mapping[str, object] = field(default_factory=dict)

    def every_target(self) -> Iterator[Target]:
        """Those of all rules, and their fallbacks."""
        for targets in (self.targets, *(rule.targets for rule in self.rules)):
            for target in targets:
                yield target
                if target.fallback is not None:
                    yield target.fallback


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A provider's model under its own name, for some projects (None: all)."""

    route: RouteEntry
    project_ids: frozenset[str] | None

    def is_for(self, project_id: str) -> bool:
        return self.project_ids is None or project_id in self.project_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """`offers`: what every project may call besides its routes; a route of that name comes first."""

    keys: Mapping[bytes, KeyEntry] = field(default_factory=dict)
    routes: Mapping[str, Mapping[str, RouteEntry]] = field(default_factory=dict)
    offers: Mapping[str, Offer] = field(default_factory=dict)

    def every_route(self) -> Iterator[RouteEntry]:
        for named in self.routes.values():
            yield from named.values()
        for offer in self.offers.values():
            yield offer.route

    def key(self, secret: bytes) -> KeyEntry | None:
        return self.keys.get(hashlib.sha256(secret).digest())

    def visible(self, key: KeyEntry) -> list[RouteEntry]:
        """The routes this key may call, by name."""
        offered = {name: offer.route for name, offer in self.offers.items() if offer.is_for(key.project_id)}
        routes = {**offered, **self.routes.get(key.project_id, {})}
        return [routes[name] for name in sorted(routes) if key.may_use(name)]

    def route(self, key: KeyEntry, name: str) -> RouteEntry | None:
        """None when there is none or this key may not see it: the caller cannot tell which."""
        if not key.may_use(name):
            return None
        route = self.routes.get(key.project_id, {}).get(name)
        if route is None and (offer := self.offers.get(name)) is not None and offer.is_for(key.project_id):
            return offer.route
        return route
