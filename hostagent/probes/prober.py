"""All health checks of this host, each at its own pace.

The one rule: one attempt at a time for each distinct (address, port, check), however many services ask for it; what is told
is a change, never an attempt. Attempts of many targets are spread over their interval, so that they never come in step. Who is
refused asks again soon: a refusal costs nothing and is no accident of a busy moment, but clients meet it too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from hostagent.probes.attempt import WELL, Finding, attempt
from hostagent.protocol.network import ProbeWanted

logger = logging.getLogger(__name__)
FIRST_INTERVAL_SECONDS = 0.2
MAX_AT_ONCE = 256
JITTER = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    address: str
    port: int
    probe: ProbeWanted


@dataclass(slots=True, kw_only=True)
class Verdict:
    """`is_up` None: not decided yet. `count`: attempts in a row that say the same; `last`: what the last one found."""

    is_up: bool | None = None
    was_well: bool = False
    count: int = 0
    last: Finding = WELL

    @property
    def is_refused(self) -> bool:
        return self.last.kind == "refused"


Attempt = Callable[[ProbeWanted, str, int], Awaitable[Finding]]


class Prober:
    """`on_change` is called with a target whose verdict's `is_up` has changed, or while it is down whether it is refused."""

    def __init__(self, on_change: Callable[[Target], None], *, attempt: Attempt = attempt) -> None:
        self._on_change = on_change
        self._attempt = attempt
        self._owners: dict[str, frozenset[Target]] = {}
        self._wishes: Counter[Target] = Counter()  # by how many owners
        self._verdicts: dict[Target, Verdict] = {}
        self._timers: dict[Target, asyncio.TimerHandle] = {}
        self._running: dict[Target, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._due: dict[Target, None] = {}  # in order, while MAX_AT_ONCE are running
        self.attempts = 0

    def want(self, owner: str, targets: Iterable[Target], *, assume_up: bool = False) -> None:
        """Replace what `owner` asks for. `assume_up`: begin with the good opinion that an earlier agent had."""
        before, after = self._owners.pop(owner, frozenset[Target]()), frozenset(targets)
        if after:
            self._owners[owner] = after
        self._wishes.update(after - before)
        for target in before - after:
            self._wishes[target] -= 1
            if not self._wishes[target]:
                del self._wishes[target]
                self._drop(target)
        for target in after - self._verdicts.keys():
            self._verdicts[target] = Verdict(is_up=True if assume_up else None)
            spread = min(target.probe.interval_ms / 1000, FIRST_INTERVAL_SECONDS)
            self._later(target, random.uniform(0, spread))  # noqa: S311 - spread, not a secret

    def verdict(self, target: Target) -> Verdict:
        return self._verdicts.get(target) or Verdict()

    def cost_per_second(self, without_owner: str = "") -> float:
        """What all wanted checks cost, in TCP attempts a second."""
        alone = (target for target in self._owners.get(without_owner, ()) if self._wishes[target] == 1)
        return cost_per_second(self._wishes) - cost_per_second(alone)

    @property
    def targets(self) -> int:
        return len(self._verdicts)

    def close(self) -> None:
        for target in list(self._verdicts):
            self._drop(target)

    def _drop(self, target: Target) -> None:
        del self._verdicts[target]
        self._due.pop(target, None)
        if timer := self._timers.pop(target, None):
            timer.cancel()
        if running := self._running.pop(target, None):
            running.cancel()

    def _later(self, target: Target, seconds: float) -> None:
        self._timers[target] = asyncio.get_running_loop().call_later(seconds, self._begin, target)

    def _begin(self, target: Target) -> None:
        self._timers.pop(target, None)
        self._due[target] = None
        self._go_on()

    def _go_on(self) -> None:
        """A task only for what runs: thousands that wait would take more memory than all else."""
        while self._due and len(self._tasks) < MAX_AT_ONCE:
            target = next(iter(self._due))
            del self._due[target]
            task = self._running[target] = asyncio.create_task(self._look(target))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()
        self._go_on()

    async def _look(self, target: Target) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        self.attempts += 1
        try:
            finding = await self._attempt(target.probe, target.address, target.port)
        except Exception as error:
            logger.exception("probing %s port %s", target.address, target.port)
            finding = Finding(f"{type(error).__name__}: {error}", "ours")
        self._running.pop(target, None)
        self._judge(target, finding)
        if verdict := self._verdicts.get(target):
            interval = target.probe.interval_ms / 1000
            if verdict.is_up is None or (verdict.is_up and verdict.is_refused):
                interval = min(interval, FIRST_INTERVAL_SECONDS)
            interval *= random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spread, not a secret
            self._later(target, max(0.0, started + interval - loop.time()))

    def _judge(self, target: Target, finding: Finding) -> None:
        if finding.kind == "ours":
            return
        verdict, is_well = self._verdicts[target], finding.kind == "well"
        verdict.count = verdict.count + 1 if verdict.was_well == is_well else 1
        was_refused, verdict.was_well, verdict.last = verdict.is_refused, is_well, finding
        needed = target.probe.rise if is_well else target.probe.fall
        if verdict.is_up is not is_well and verdict.count >= needed:
            verdict.is_up = is_well
            self._on_change(target)
        elif verdict.is_up is False and was_refused != verdict.is_refused:
            self._on_change(target)


_COST = {"tcp": 1.0, "http": 3.0, "https": 20.0, "grpc": 12.0}  # measured: tests/bench/loadbalancer_probes.py


def cost_per_second(targets: Iterable[Target]) -> float:
    """In TCP attempts a second."""
    return sum(_COST[target.probe.kind] * 1000 / target.probe.interval_ms for target in targets)
