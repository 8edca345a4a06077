"""How many replicas an endpoint should have: pure arithmetic over what gateways said, with the reason in words.

The one rule: what is missing never scales down. The means are those of Knative's autoscaler (stable and panic window over
requests in flight), with what waits added and replicas that are still starting counted as capacity.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from cronsim import CronSim

PANIC_RATIO = 2.0
TOLERANCE = 0.1
MORE_REQUESTS = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From each start of `cron` (five fields, in `timezone`) on, for `minutes`, other bounds hold."""

    cron: str
    minutes: int
    min_replicas: int
    max_replicas: int
    timezone: str = "UTC"

    def is_open(self, now: datetime) -> bool:
        """Whether it began within its length before `now`."""
        local = now.astimezone(ZoneInfo(self.timezone))
        starts = CronSim(self.cron, local + timedelta(minutes=1), reverse=True)
        last = next((start for start in itertools.islice(starts, 3) if start <= local), None)
        return last is not None and local < last + timedelta(minutes=self.minutes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`target_in_flight` and `target_requests_per_second` are per replica; `idle_seconds` None: never to zero."""

    min_replicas: int = 1
    max_replicas: int = 1
    target_in_flight: float = 8.0
    target_requests_per_second: float | None = None
    stable_seconds: int = 60
    panic_seconds: int = 6
    scale_down_delay_seconds: int = 300
    idle_seconds: int | None = None
    windows: tuple[Window, ...] = ()

    def bounds(self, now: datetime) -> tuple[int, int]:
        """Least and most replicas now: those of open windows, the larger where several are open."""
        here = [window for window in self.windows if window.is_open(now)]
        if not here:
            return self.min_replicas, self.max_replicas
        return max(window.min_replicas for window in here), max(window.max_replicas for window in here)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One look. `load` is None when a gateway that should speak is silent. `start_seconds`: what a replica needs to start.

    Times in seconds on one clock; requests count when they arrive.
    """

    at: float
    load: float | None
    requests_per_second: float = 0.0
    idle_for: float | None = None
    ready: int = 0
    starting: int = 0
    start_seconds: float = 180.0
    wanted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    replicas: int
    reason: str


@dataclass(slots=True, kw_only=True)
class History:
    """What one autoscaler remembers of one endpoint. A fresh one cannot scale down until its delay is full."""

    began: float
    samples: deque[tuple[float, float, float]] = field(default_factory=deque)
    wants: deque[tuple[float, int]] = field(default_factory=deque)
    ordered_at: float = -math.inf
    ordered_rate: float = 0.0
    panic_over_at: float = 0.0
    panic_peak: int = 0

    def mean(self, now: float, seconds: float, column: int) -> float:
        """The mean of the last `seconds`, or of what there is of them."""
        recent = [sample[column] for sample in self.samples if sample[0] > now - seconds]
        return sum(recent) / len(recent) if recent else 0.0


def decide(policy: Policy, history: History, seen: Seen, now: datetime) -> Decision:
    """The number of replicas to want from now on; the same number with the reason why it stays."""
    least, most = policy.bounds(now)
    if seen.load is None:
        kept = max(least, min(seen.wanted, most))
        return Decision(replicas=kept, reason="a gateway does not report its load: nothing is taken away")
    _remember(policy, history, seen)
    want, reason = _want(policy, history, seen)
    if least == 0 and _is_idle(policy, history, seen):
        want, reason = 0, "no request" if seen.idle_for is None else f"idle for {seen.idle_for:.0f} s"
    elif want < (floor := max(1, least)):
        want, reason = floor, f"{reason}, and at least {floor} are kept"
    if want > most:
        want, reason = most, f"{reason}, and no more than {most} are allowed"
    history.wants.append((seen.at, want))
    if want > seen.wanted > 0:
        return _up(policy, history, seen, want, reason)
    if want >= seen.wanted:
        return Decision(replicas=want, reason=reason)
    return _down(policy, history, seen, want, reason)


def _remember(policy: Policy, history: History, seen: Seen) -> None:
    assert seen.load is not None
    history.samples.append((seen.at, seen.load, seen.requests_per_second))
    while history.samples[0][0] <= seen.at - policy.stable_seconds:
        history.samples.popleft()


def _want(policy: Policy, history: History, seen: Seen) -> tuple[int, str]:
    """The most that any signal asks for, and that signal in words."""
    stable = history.mean(seen.at, policy.stable_seconds, 1)
    panic = history.mean(seen.at, policy.panic_seconds, 1)
    target = policy.target_in_flight
    by_stable, by_panic = math.ceil(stable / target), math.ceil(panic / target)
    capacity = max(1, seen.ready + seen.starting)
    if by_panic / capacity >= PANIC_RATIO:
        history.panic_over_at = seen.at + policy.stable_seconds
    want, reason = by_stable, f"stable mean {stable:.1f} over target {target:g}"
    if seen.at < history.panic_over_at:
        history.panic_peak = max(history.panic_peak, by_panic)
        if max(by_panic, history.panic_peak) >= by_stable:
            want, reason = max(by_panic, history.panic_peak), f"panic mean {panic:.1f} over target {target:g}"
    else:
        history.panic_peak = 0
        if by_stable > seen.wanted and stable <= seen.wanted * target * (1 + TOLERANCE):
            want, reason = seen.wanted, f"stable mean {stable:.1f} within a tenth of target {target:g}"
    if policy.target_requests_per_second:
        rate = history.mean(seen.at, policy.stable_seconds, 2)
        by_rate = math.ceil(rate / policy.target_requests_per_second)
        if by_rate > want:
            want, reason = by_rate, f"{rate:.1f} requests/s over target {policy.target_requests_per_second:g}"
    return want, reason


def _up(policy: Policy, history: History, seen: Seen, want: int, reason: str) -> Decision:
    """More; but what waits for replicas ordered a moment ago is no reason to order again, unless more requests come."""
    rate = history.mean(seen.at, policy.panic_seconds, 2)
    is_starting = seen.starting > 0 and seen.at - history.ordered_at < seen.start_seconds
    if is_starting and rate <= 1 + MORE_REQUESTS * history.ordered_rate:
        return Decision(replicas=seen.wanted, reason=f"{reason}; {seen.starting} are starting")
    history.ordered_at, history.ordered_rate = seen.at, rate
    return Decision(replicas=want, reason=reason)


def _is_idle(policy: Policy, history: History, seen: Seen) -> bool:
    """Nothing is asked, and the last request ended long enough ago (or the endpoint sleeps already)."""
    if seen.load:
        return False
    if seen.wanted == 0:
        return True
    idle_for = seen.at - history.began if seen.idle_for is None else seen.idle_for
    return policy.idle_seconds is not None and idle_for >= policy.idle_seconds


def _down(policy: Policy, history: History, seen: Seen, want: int, reason: str) -> Decision:
    """One replica less a look, and never below the most that was wanted within the delay."""
    delay = policy.scale_down_delay_seconds
    while history.wants[0][0] < seen.at - delay:
        history.wants.popleft()
    if want == 0:
        return Decision(replicas=0, reason=reason)
    if seen.at - history.began < delay:
        return Decision(replicas=seen.wanted, reason=f"{reason}; less only after {delay} s of looking")
    held = max(wanted for _, wanted in history.wants)
    if held >= seen.wanted or seen.at < history.panic_over_at:
        return Decision(replicas=seen.wanted, reason=f"{reason}; it was more within the last {delay} s")
    return Decision(replicas=seen.wanted - 1, reason=reason)
