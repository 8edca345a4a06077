"""The arithmetic of a roll-out: which replicas to make and to take away, what share of the requests the new ones get, when to
go back. No clock, no I/O.

The one rule: fewer than `replicas - max_unavailable` ready ones are never brought about by taking one away that is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

LEAST_REQUESTS = 20  # of a revision, before its errors or its times say anything
LEAST_TTFT_MS = 50.0  # what is quicker than this is not slow, whatever the others do


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """`max_surge` replicas more than wanted, `max_unavailable` fewer. The first new one gets `weight` percent of the requests
    for `watch_seconds`, then more and more over `ramp_seconds`; `is_held`: it stays so until somebody promotes it.
    """

    max_surge: int = 1
    max_unavailable: int = 0
    weight: float = 10.0
    watch_seconds: float = 20.0
    ramp_seconds: float = 20.0
    is_held: bool = False
    ready_seconds: float = 1800.0
    max_error_rate: float = 0.05
    max_ttft_ratio: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What gateways saw of one revision since the roll-out began."""

    requests: int = 0
    failures: int = 0
    ttft_p95_ms: float | None = None
    ttft_count: int = 0

    @property
    def error_rate(self) -> float:
        return self.failures / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A replica that is not being taken away. `failure`: why it will never be ready; `since`: since when it could become so."""

    id: str
    is_new: bool
    is_ready: bool
    is_unhealthy: bool = False
    is_waiting: bool = False
    since: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Stored in `endpoint.rollout`. Times are seconds since the epoch. `share`: percent of the requests that replicas of the
    present revision get; None: as many as they are. `is_back`: it goes back to what was there before.
    """

    from_revision: int
    strategy: Strategy = field(default_factory=Strategy)
    began_at: float
    watched_since: float | None = None
    promoted_at: float | None = None
    share: float | None = 0.0
    is_back: bool = False

    def is_ramping(self, now: float) -> bool:
        return not self.is_back and self.promoted_at is not None and now < self.promoted_at + self.strategy.ramp_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What to do now. `back`: why it goes back. `create`: so many new ones; `remove`: these old ones. `is_done`: over."""

    rollout: Rollout
    create: int = 0
    remove: Sequence[Body] = ()
    back: str = ""
    is_done: bool = False


def decide(rollout: Rollout, bodies: Sequence[Body], wanted: int, traffic: tuple[Traffic, Traffic], now: float) -> Move:
    """`traffic`: of the present revision, and of the one before."""
    if not rollout.is_back and (reason := _failure(rollout, bodies, traffic, now)):
        return Move(rollout=rollout, back=reason)
    rollout = _advanced(rollout, bodies, wanted, now)
    old = [body for body in bodies if not body.is_new]
    new = [body for body in bodies if body.is_new]
    ready = sum(body.is_ready for body in new)
    if not old and (ready >= wanted or not wanted) and (rollout.promoted_at is not None or not wanted):
        return Move(rollout=rollout, is_done=not rollout.is_ramping(now) or not wanted)
    limit = wanted if rollout.promoted_at is not None else min(wanted, 1)
    strategy = rollout.strategy
    create = max(0, min(limit - len(new), wanted + strategy.max_surge - len(bodies)))
    return Move(rollout=rollout, create=create, remove=_leaving(rollout, old, new, wanted, now))


def _advanced(rollout: Rollout, bodies: Sequence[Body], wanted: int, now: float) -> Rollout:
    """The next state of watching and of the share."""
    strategy = rollout.strategy
    new = sum(body.is_new and body.is_ready for body in bodies)
    old = sum(not body.is_new and body.is_ready for body in bodies)
    if rollout.is_back:
        return replace(rollout, share=100.0 if new else None)
    if rollout.watched_since is None and new:
        rollout = replace(rollout, watched_since=now)
    is_watched = rollout.watched_since is not None and now >= rollout.watched_since + strategy.watch_seconds
    if rollout.promoted_at is None and (not wanted or (is_watched and not strategy.is_held)):
        rollout = replace(rollout, promoted_at=now)
    if not new:
        return replace(rollout, share=0.0)
    if not old:
        return replace(rollout, share=None)
    if rollout.promoted_at is None:
        return replace(rollout, share=strategy.weight)
    if not rollout.is_ramping(now):
        return replace(rollout, share=None)
    natural = 100 * new / (new + old)
    gone = (now - rollout.promoted_at) / strategy.ramp_seconds
    return replace(rollout, share=round(strategy.weight + (natural - strategy.weight) * gone))


def _leaving(rollout: Rollout, old: Sequence[Body], new: Sequence[Body], wanted: int, now: float) -> Sequence[Body]:
    """The old ones to take away now: first those that are not ready."""
    strategy = rollout.strategy
    ready_new = sum(body.is_ready for body in new)
    is_settled = rollout.is_back or not wanted or (rollout.promoted_at is not None and not rollout.is_ramping(now))
    too_many = len(old) - max(0, wanted - ready_new) if is_settled else 0
    is_short = not strategy.max_surge and len(new) < (wanted if rollout.promoted_at is not None else min(1, wanted))
    if is_short:  # without a surge an old one goes first, to make the room
        too_many = max(too_many, len(old) + len(new) - wanted + 1)
    if rollout.is_back:  # what failed serves nobody, so nobody misses it
        return old if is_settled else ()
    spare = sum(body.is_ready for body in (*old, *new)) - (wanted - strategy.max_unavailable)
    chosen: list[Body] = []
    for body in sorted(old, key=lambda body: body.is_ready):
        if len(chosen) >= too_many or (body.is_ready and spare <= 0):
            break
        spare -= body.is_ready
        chosen.append(body)
    return chosen


def _failure(rollout: Rollout, bodies: Sequence[Body], traffic: tuple[Traffic, Traffic], now: float) -> str:
    """Why to go back; empty: no reason."""
    strategy = rollout.strategy
    for body in bodies:
        name = body.id[-8:]
        if not body.is_new or body.is_waiting:
            continue
        if body.is_unhealthy:
            return f"{name} stopped answering for its model: {body.failure or 'no answer'}"
        if body.failure and not body.is_ready and now >= body.since + strategy.ready_seconds:
            return f"{name} was not ready within {strategy.ready_seconds:g} s: {body.failure}"
        if not body.is_ready and now >= body.since + strategy.ready_seconds:
            return f"{name} was not ready within {strategy.ready_seconds:g} s"
    new, old = traffic
    if new.requests >= LEAST_REQUESTS and new.error_rate > old.error_rate + strategy.max_error_rate:
        return (
            f"{new.failures} of {new.requests} requests failed ({100 * new.error_rate:.0f} %), "
            f"before it {100 * old.error_rate:.0f} %; allowed are {100 * strategy.max_error_rate:.0f} % more"
        )
    return _slowness(strategy, new, old)


def _slowness(strategy: Strategy, new: Traffic, old: Traffic) -> str:
    if new.ttft_p95_ms is None or old.ttft_p95_ms is None or min(new.ttft_count, old.ttft_count) < LEAST_REQUESTS:
        return ""
    most = max(LEAST_TTFT_MS, old.ttft_p95_ms) * strategy.max_ttft_ratio
    if new.ttft_p95_ms <= most:
        return ""
    return (
        f"95 % of first tokens took up to {new.ttft_p95_ms:.0f} ms, before it {old.ttft_p95_ms:.0f} ms; "
        f"allowed is {strategy.max_ttft_ratio:g} times as long"
    )
