"""Limits per key and per key and model: requests and tokens a minute, each in a bucket of its own, and requests at a time.

The one rule: a refusal costs nothing in any bucket. Reserved first and settled after; shared by all gateways through Redis, in
advances of at most a second's worth; with Redis away each gateway has the rate divided by the gateways there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from controlplane.gateway import problem
from controlplane.gateway.bucket import Bucket, duration
from controlplane.gateway.directory import KeyEntry
from controlplane.gateway.problem import Problem
from controlplane.gateway.resp import RedisAway
from controlplane.gateway.shared import Refusal, SharedLimits, Slots, Want

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_SOON_SECONDS = 0.05
_RENEW_SECONDS = 3.0
_FORGET_SECONDS = 120.0
_PREFIX = "bedplate:limit"

NO_KEY_HEADERS = tuple(
    (f"x-ratelimit-{word}-{what}".encode(), b"0s" if word == "reset" else b"0")
    for word in ("limit", "remaining", "reset")
    for what in ("requests", "tokens")
)
"""What an answer without a valid key says: it may do nothing."""


class KeyLimits:
    """What one key may still do; `of` gives what holds for one model of it."""

    __slots__ = ("_pairs", "key_id", "lock", "pending", "running", "slots_held", "slots_most", "slots_told_at", "used_at")

    def __init__(self, key_id: str) -> None:
        self.key_id = key_id
        self.lock = asyncio.Lock()
        self.pending = [0, 0]  # requests and tokens of those who wait for the lock
        self.running = 0
        self.slots_held = 0
        self.slots_most: int | None = None
        self.slots_told_at = 0.0
        self.used_at = 0.0
        self._pairs: dict[str, tuple[Bucket, Bucket]] = {}

    @property
    def slots_name(self) -> str:
        return f"{_PREFIX}:{{{self.key_id}}}:places"

    def pair(self, model: str, requests: int, tokens: int, now: float) -> tuple[Bucket, Bucket]:
        """Buckets of the key (empty model) or of one model; what was used stays used when a limit has changed."""
        found = self._pairs.get(model)
        if found is None:
            name, words = f"{_PREFIX}:{{{self.key_id}}}:{model}", f" for the model '{model[:200]}'" if model else ""
            found = (
                Bucket(f"{name}:requests", f"requests per minute{words}", requests, now),
                Bucket(f"{name}:tokens", f"tokens per minute{words}", tokens, now),
            )
            self._pairs[model] = found
        for bucket, per_minute in zip(found, (requests, tokens), strict=True):
            if bucket.per_minute != per_minute:
                bucket.arrival = now + min(60.0, bucket.ahead(now) * bucket.per_minute / per_minute)
                bucket.per_minute = per_minute
        return found

    def every_bucket(self) -> list[Bucket]:
        return [bucket for pair in self._pairs.values() for bucket in pair]


class Buckets:
    """What holds for one request: the key's own pair of buckets, and the model's where the key has limits for it."""

    __slots__ = ("limits", "pairs")

    def __init__(self, limits: KeyLimits, pairs: Sequence[tuple[Bucket, Bucket]]) -> None:
        self.limits = limits
        self.pairs = pairs

    def costs(self, tokens: int) -> list[tuple[Bucket, int]]:
        """Each bucket and what a request of so many tokens takes from it."""
        return [(bucket, cost) for pair in self.pairs for bucket, cost in zip(pair, (1, tokens), strict=True)]

    def headers(self, now: float) -> tuple[tuple[bytes, bytes], ...]:
        """Of the tighter of the two where a model has limits of its own."""
        if len(self.pairs) == 1:
            requests, tokens = self.pairs[0]
        else:
            requests, tokens = (min(pair, key=lambda bucket: bucket.remaining(now)) for pair in zip(*self.pairs, strict=True))
        return (
            (b"x-ratelimit-limit-requests", b"%d" % requests.per_minute),
            (b"x-ratelimit-limit-tokens", b"%d" % tokens.per_minute),
            (b"x-ratelimit-remaining-requests", b"%d" % requests.remaining(now)),
            (b"x-ratelimit-remaining-tokens", b"%d" % tokens.remaining(now)),
            (b"x-ratelimit-reset-requests", duration(requests.reset(now))),
            (b"x-ratelimit-reset-tokens", duration(tokens.reset(now))),
        )


class Limiter:
    """The limits of every key seen; `requests_per_minute` and `tokens_per_minute` hold for keys without their own.

    `gateways` is how many there are, ourselves included. Without `shared` we are on our own, for good.
    """

    def __init__(self, *, requests_per_minute: int, tokens_per_minute: int, shared: SharedLimits | None = None) -> None:
        self.gateways = 1
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._shared = shared
        self._keys: dict[str, KeyLimits] = {}
        self._dirty: dict[str, KeyLimits] = {}
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        return sum(limits.running for limits in self._keys.values())

    @property
    def is_alone(self) -> bool:
        return self._shared is None or self._shared.is_away

    def divide_by(self, gateways: int) -> None:
        self.gateways = gateways

    def buckets(self, key: KeyEntry, now: float, model: str = "") -> Buckets:
        """What holds for this key, and for the model when it has limits of its own."""
        limits = self._keys.get(key.id)
        if limits is None:
            limits = self._keys[key.id] = KeyLimits(key.id)
        limits.slots_most = key.max_concurrent
        requests = key.requests_per_minute or self._requests_per_minute
        tokens = key.tokens_per_minute or self._tokens_per_minute
        pairs = [limits.pair("", requests, tokens, now)]
        if model and (own := key.model_limits.get(model)):
            pairs.append(limits.pair(model, own.requests_per_minute or requests, own.tokens_per_minute or tokens, now))
        return Buckets(limits, pairs)

    async def reserve(self, buckets: Buckets, tokens: int) -> None:
        """Take a place, one request and `tokens`; raises Problem 429 and takes nothing when one of them does not fit.

        `release` gives the place back, on every way out.
        """
        limits, costs = buckets.limits, buckets.costs(tokens)
        limits.used_at = time.monotonic()
        if not self.is_alone:
            if limits.lock.locked() or not self._fits(limits, costs):
                with suppress(RedisAway):
                    await self._reserve_shared(limits, costs, tokens)
                    return
            else:
                self._spend(limits, costs)
                return
        self._reserve_alone(limits, costs, time.monotonic())

    async def _reserve_shared(self, limits: KeyLimits, costs: list[tuple[Bucket, int]], tokens: int) -> None:
        """Fetch what is missing, and what those behind us will ask for. Raises Problem or RedisAway."""
        limits.pending[0] += 1
        limits.pending[1] += tokens
        try:
            async with limits.lock:
                if self.is_alone:
                    raise RedisAway
                if not self._fits(limits, costs) and (refusal := await self._fetch(limits, costs)):
                    raise self._refused(limits, refusal)
                self._spend(limits, costs)
        finally:
            limits.pending[0] -= 1
            limits.pending[1] -= tokens

    async def _fetch(self, limits: KeyLimits, costs: list[tuple[Bucket, int]]) -> Refusal | None:
        assert self._shared is not None
        now = time.monotonic()
        wants: list[Want] = []
        for number, (bucket, cost) in enumerate(costs):
            need = max(0, cost - bucket.credit)
            more = max(bucket.expected(now), limits.pending[number % 2]) if need else 0
            wants.append(Want(bucket, need, max(need, more - bucket.credit)))
        slots = None
        if limits.slots_most is not None:
            slots = Slots(name=limits.slots_name, held=limits.running + 1, most=limits.slots_most)
        refusal = await self._shared.take(wants, slots)
        if refusal is None and slots is not None:
            limits.slots_held, limits.slots_told_at = slots.held, now
        return refusal

    def _refused(self, limits: KeyLimits, refusal: Refusal) -> Problem:
        if refusal.bucket is None:
            return problem.too_many_at_once(limits.slots_most or 0)
        return problem.rate_limited(refusal.bucket.what, refusal.wait_seconds)

    @staticmethod
    def _fits(limits: KeyLimits, costs: list[tuple[Bucket, int]]) -> bool:
        if limits.slots_most is not None and (limits.running >= limits.slots_held or limits.slots_held > limits.slots_most):
            return False
        return all(bucket.credit >= cost for bucket, cost in costs)

    @staticmethod
    def _spend(limits: KeyLimits, costs: list[tuple[Bucket, int]]) -> None:
        for bucket, cost in costs:
            bucket.spend(cost)
        limits.running += 1

    def _reserve_alone(self, limits: KeyLimits, costs: list[tuple[Bucket, int]], now: float) -> None:
        if limits.slots_most is not None and limits.running >= max(1, limits.slots_most // self.gateways):
            raise problem.too_many_at_once(limits.slots_most)
        for bucket, cost in costs:
            if wait := bucket.wait_alone(cost, self.gateways, now):
                raise problem.rate_limited(bucket.what, wait)
        for bucket, cost in costs:
            bucket.take_alone(cost, self.gateways, now)
        limits.running += 1

    def settle(self, buckets: Buckets, difference: int) -> None:
        """What was used beyond what was reserved (negative: less) moves between bucket and reservation."""
        now = time.monotonic()
        for _, bucket in buckets.pairs:
            if self.is_alone:
                bucket.take_alone(difference, self.gateways, now)
            else:
                bucket.credit -= difference
        if difference and self._shared is not None:
            self._note(buckets.limits)

    def release(self, buckets: Buckets) -> None:
        limits = buckets.limits
        limits.running -= 1
        if limits.slots_held > limits.running and self._shared is not None:
            self._note(limits, is_urgent=True)

    def _note(self, limits: KeyLimits, *, is_urgent: bool = False) -> None:
        self._dirty[limits.key_id] = limits
        if is_urgent:
            self._wake.set()

    async def run(self) -> None:
        """Until cancelled: give back what we do not need, renew the places we hold, see what others took."""
        if self._shared is None:
            await asyncio.Event().wait()
            return
        looked_at = 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if self._shared.is_away:
                    await self._come_back(self._shared)
                else:
                    await self._give_back(self._shared)
                    if time.monotonic() - looked_at >= _LOOK_SECONDS:
                        looked_at = time.monotonic()
                        await self._look(self._shared, looked_at)
            except RedisAway as error:
                log.warning("Redis is away; limits are divided by %d gateways: %s", self.gateways, error)
            await asyncio.sleep(_SOON_SECONDS)

    async def _give_back(self, shared: SharedLimits) -> None:
        dirty, self._dirty = self._dirty, {}
        while dirty:
            key_id, limits = dirty.popitem()
            try:
                await self._tell(shared, limits)
            except RedisAway:
                self._dirty |= {key_id: limits, **dirty}
                raise

    async def _tell(self, shared: SharedLimits, limits: KeyLimits) -> None:
        async with limits.lock:
            now = time.monotonic()
            wants = [Want(bucket, -surplus, 0) for bucket in limits.every_bucket() if (surplus := bucket.surplus(now))]
            slots = None
            if limits.slots_held > limits.running or (limits.slots_held and now - limits.slots_told_at > _RENEW_SECONDS):
                slots = Slots(name=limits.slots_name, held=limits.running, most=limits.slots_most or 0)
            if wants or slots:
                if slots is not None:
                    limits.slots_held, limits.slots_told_at = slots.held, now
                await shared.take(wants, slots, is_forced=True)

    async def _look(self, shared: SharedLimits, now: float) -> None:
        """Keys of which nothing is left to know are forgotten."""
        active: list[Bucket] = []
        for limits in list(self._keys.values()):
            if now - limits.used_at > _FORGET_SECONDS and not limits.running and not limits.lock.locked():
                del self._keys[limits.key_id]
            elif now - limits.used_at < _LOOK_SECONDS * 60:
                active += limits.every_bucket()
            if limits.slots_held or any(bucket.surplus(now) for bucket in limits.every_bucket()):
                self._note(limits)
        await shared.look(active)

    async def _come_back(self, shared: SharedLimits) -> None:
        """Once it answers, tell what was used without it: exact when it kept what it knew, and put back when it did not."""
        if not await shared.is_back():
            return
        log.warning("Redis is back; limits are shared again")
        shared.is_away = False
        for limits in list(self._keys.values()):
            async with limits.lock:
                wants = [Want(bucket, bucket.rejoin(self.gateways), 0) for bucket in limits.every_bucket()]
                slots = None
                if limits.running and limits.slots_most is not None:
                    slots = Slots(name=limits.slots_name, held=limits.running, most=limits.slots_most)
                    limits.slots_held, limits.slots_told_at = limits.running, time.monotonic()
                await shared.take(wants, slots, is_forced=True)

    async def close(self) -> None:
        """Give everything back, when Redis is there."""
        if self._shared is None:
            return
        with suppress(RedisAway):
            for limits in list(self._keys.values()):
                for bucket in limits.every_bucket():
                    bucket.fetched_at = 0.0
                await self._tell(self._shared, limits)
        self._shared.close()
