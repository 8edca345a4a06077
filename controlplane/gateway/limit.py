"""Limits per key: requests and tokens a minute, each in a bucket of its own (GCRA), reserved first and settled after.

The one rule: a refusal costs nothing in any bucket. Buckets are this gateway's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.gateway import problem
from controlplane.gateway.directory import KeyEntry

_WINDOW_SECONDS = 60.0


class Bucket:
    """The generic cell rate algorithm (ITU-T I.371): one number, the theoretical arrival time."""

    __slots__ = ("_arrival", "_interval", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._interval = _WINDOW_SECONDS / per_minute
        self._arrival = now

    def wait(self, cost: int, now: float) -> float:
        """Seconds until `cost` fits; 0 = now. What is larger than the bucket fits when the bucket is full."""
        cost = min(cost, self.per_minute)
        return max(0.0, max(self._arrival, now) + cost * self._interval - now - _WINDOW_SECONDS)

    def take(self, cost: int, now: float) -> None:
        """A negative cost gives back."""
        self._arrival = max(self._arrival, now) + cost * self._interval

    def remaining(self, now: float) -> int:
        return max(0, min(self.per_minute, int((now + _WINDOW_SECONDS - max(self._arrival, now)) / self._interval + 1e-6)))

    def reset(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return max(0.0, self._arrival - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    requests: Bucket
    tokens: Bucket

    def headers(self, now: float) -> tuple[tuple[bytes, bytes], ...]:
        return (
            (b"x-ratelimit-limit-requests", b"%d" % self.requests.per_minute),
            (b"x-ratelimit-limit-tokens", b"%d" % self.tokens.per_minute),
            (b"x-ratelimit-remaining-requests", b"%d" % self.requests.remaining(now)),
            (b"x-ratelimit-remaining-tokens", b"%d" % self.tokens.remaining(now)),
            (b"x-ratelimit-reset-requests", duration(self.requests.reset(now))),
            (b"x-ratelimit-reset-tokens", duration(self.tokens.reset(now))),
        )


NO_KEY_HEADERS = tuple(
    (f"x-ratelimit-{word}-{what}".encode(), b"0s" if word == "reset" else b"0")
    for word in ("limit", "remaining", "reset")
    for what in ("requests", "tokens")
)
"""What an answer without a valid key says: it may do nothing."""


class Limiter:
    """The buckets of every key seen; `requests_per_minute` and `tokens_per_minute` hold for keys without their own."""

    def __init__(self, *, requests_per_minute: int, tokens_per_minute: int) -> None:
        self._requests_per_minute = requests_per_minute
        self._tokens_per_minute = tokens_per_minute
        self._buckets: dict[str, Buckets] = {}
        self._running: dict[str, int] = {}

    def buckets(self, key: KeyEntry, now: float) -> Buckets:
        """The key's buckets; new ones when its limits have changed."""
        requests = key.requests_per_minute or self._requests_per_minute
        tokens = key.tokens_per_minute or self._tokens_per_minute
        found = self._buckets.get(key.id)
        if found is None or found.requests.per_minute != requests or found.tokens.per_minute != tokens:
            found = Buckets(requests=Bucket(requests, now), tokens=Bucket(tokens, now))
            self._buckets[key.id] = found
        return found

    def reserve(self, key: KeyEntry, buckets: Buckets, tokens: int, now: float) -> None:
        """Take a place, one request and `tokens`; raises Problem 429 and takes nothing when one of them does not fit.

        `release` gives the place back, on every way out.
        """
        running = self._running.get(key.id, 0)
        if key.max_concurrent is not None and running >= key.max_concurrent:
            raise problem.too_many_at_once(key.max_concurrent)
        if wait := buckets.requests.wait(1, now):
            raise problem.rate_limited("requests", wait)
        if wait := buckets.tokens.wait(tokens, now):
            raise problem.rate_limited("tokens", wait)
        buckets.requests.take(1, now)
        buckets.tokens.take(tokens, now)
        self._running[key.id] = running + 1

    def release(self, key: KeyEntry) -> None:
        left = self._running[key.id] - 1
        if left:
            self._running[key.id] = left
        else:
            del self._running[key.id]


def duration(seconds: float) -> bytes:
    """As Go writes durations: `0s`, `250ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds else b"0s"
    whole, rest = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    tail = f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)
    return (f"{hours}h" if hours else "").encode() + (f"{minutes}m" if hours or minutes else "").encode() + f"{tail}s".encode()
