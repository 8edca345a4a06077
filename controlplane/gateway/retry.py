"""Whether a request that met a fault before its first byte may go to another replica.

The one rule: a retry costs an engine what a request costs, so retries are a share of requests (the budget). A replica that
could not be connected to saw nothing: going on to the next one costs no budget and no waiting.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum, auto

from controlplane.gateway.problem import Problem

BUDGET_SHARE = 0.2
BUDGET_LEAST = 10.0
BUDGET_MOST = 100.0


class FaultKind(Enum):
    UNREACHED = auto()
    """Could not be connected to: the replica saw nothing."""
    CUT = auto()
    """Reset or ended before the first byte of its answer."""
    BUSY = auto()
    """503: another replica may have room."""
    FAILED = auto()
    """Another 5xx: the same engine would fail again; a fallback may not."""


class Fault(Exception):
    """What an attempt met before anything went to the client; `problem` is what the client gets when this was the last."""

    def __init__(self, kind: FaultKind, problem: Problem) -> None:
        super().__init__(problem.message)
        self.kind = kind
        self.problem = problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`max_attempts` counts the first; `backoff_seconds` doubles each time, with full jitter; 0 goes on at once."""

    max_attempts: int = 3
    backoff_seconds: float = 0.0

    def wait(self, attempts: int) -> float:
        """Seconds to wait after that many attempts."""
        return random.uniform(0.5, 1.0) * self.backoff_seconds * 2 ** (attempts - 1) if self.backoff_seconds else 0.0  # noqa: S311 - spreads load


DEFAULT_POLICY = RetryPolicy()


class RetryBudget:
    """A token bucket of one route: each request puts in a share, each retry takes one."""

    def __init__(self) -> None:
        self._tokens = BUDGET_LEAST

    def deposit(self) -> None:
        self._tokens = min(BUDGET_MOST, self._tokens + BUDGET_SHARE)

    def withdraw(self) -> bool:
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
