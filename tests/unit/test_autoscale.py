"""The autoscaler's arithmetic over arrival traces: steady, burst, days, long streams, silence; its log is a golden file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from controlplane.resources.endpoint.autoscale import History, Policy, Seen, Window, decide

BEGAN = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "autoscaler.txt"


@dataclass
class Simulation:
    """Requests of `work_seconds` at replicas that take `slots` each and need `start_seconds` to start."""

    policy: Policy
    replicas: int = 1
    work_seconds: float = 2.0
    slots: int = 12
    start_seconds: int = 30
    log: list[str] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.history = History(began=0.0)
        self.ready = self.replicas
        self.starts: list[int] = []
        self.running: list[float] = []
        self.waiting = 0
        self.ended: float | None = None
        self.lost = 0

    def run(self, arrivals: Iterable[int], *, silent: Callable[[int], bool] = lambda _: False) -> None:
        for second, count in enumerate(arrivals):
            self._step(second, count, is_silent=silent(second))
            self.peaks.append(self.replicas)

    def _step(self, second: int, count: int, *, is_silent: bool) -> None:
        self.ready += sum(at <= second for at in self.starts)
        self.starts = [at for at in self.starts if at > second]
        before = len(self.running)
        self.running = [left - 1 for left in self.running if left > 1]
        if len(self.running) < before:
            self.ended = float(second)
        self.waiting += count
        entering = min(self.waiting, max(0, self.ready * self.slots - len(self.running)))
        self.waiting -= entering
        self.running += [self.work_seconds] * entering
        seen = Seen(
            at=float(second),
            load=None if is_silent else len(self.running) + self.waiting,
            requests_per_second=count,
            idle_for=None if self.ended is None else second - self.ended,
            ready=self.ready,
            starting=len(self.starts),
            start_seconds=self.start_seconds,
            wanted=self.replicas,
        )
        decision = decide(self.policy, self.history, seen, BEGAN + timedelta(seconds=second))
        if decision.replicas != self.replicas:
            self.log.append(f"{second:>6} s  {self.replicas} → {decision.replicas}: {decision.reason}")
        self._become(decision.replicas, second)

    def _become(self, wanted: int, second: int) -> None:
        if wanted > self.replicas:
            self.starts += [second + self.start_seconds] * (wanted - self.replicas)
        for _ in range(self.replicas - wanted):
            if self.starts:
                self.starts.pop()
                continue
            assert self.ready * self.slots - self.slots >= 0
            self.lost += max(0, len(self.running) - (self.ready - 1) * self.slots)
            self.ready -= 1
        self.replicas = wanted


def steady(rate: int, seconds: int) -> list[int]:
    return [rate] * seconds


def burst() -> list[int]:
    return steady(2, 120) + steady(40, 60) + steady(2, 600)


def day() -> list[int]:
    """A day in an hour: quiet, busy, quiet."""
    return [round(10 + 9 * math.sin(2 * math.pi * second / 3600 - math.pi / 2)) for second in range(3600)]


def test_a_steady_load_settles_and_stays() -> None:
    simulation = Simulation(Policy(max_replicas=10))
    simulation.run(steady(12, 900))
    assert len(set(simulation.peaks[600:])) == 1
    assert simulation.peaks[-1] == 3  # 12/s for 2 s = 24 in flight, 8 a replica


def test_a_burst_is_met_in_seconds_and_given_back_slowly() -> None:
    simulation = Simulation(Policy(max_replicas=20, scale_down_delay_seconds=120))
    simulation.run(burst())
    peak = max(simulation.peaks)
    assert simulation.peaks[130] >= 6
    assert 10 <= peak <= 20
    assert simulation.peaks[-1] == 1
    downs = [earlier - later for earlier, later in zip(simulation.peaks, simulation.peaks[1:], strict=False)]
    assert max(downs) == 1
    assert simulation.lost == 0


def test_slow_starts_do_not_trigger_ten() -> None:
    """While replicas start, what waits grows; the wanted number follows the load, not the wait for it."""
    simulation = Simulation(Policy(max_replicas=100), start_seconds=180)
    simulation.run(steady(4, 60) + steady(20, 150))
    backlog = math.ceil(20 * 150 / 8)
    assert max(simulation.peaks) < backlog


def test_a_day() -> None:
    simulation = Simulation(Policy(max_replicas=10))
    simulation.run(day())
    assert max(simulation.peaks) == 5
    assert min(simulation.peaks) == 1
    assert len(simulation.log) < 40
    assert simulation.lost == 0


def test_long_streams_keep_their_replica() -> None:
    """One stream of 90 s with an idle time of 30 s: the replica stays until the stream has ended, and 30 s more."""
    simulation = Simulation(Policy(min_replicas=0, max_replicas=2, idle_seconds=30, stable_seconds=10), work_seconds=90)
    simulation.run([1] + [0] * 150)
    assert simulation.log[0].endswith("1 → 0: idle for 30 s")
    assert int(simulation.log[0].split()[0]) == 120


def test_from_zero_at_once() -> None:
    simulation = Simulation(Policy(min_replicas=0, max_replicas=4, idle_seconds=10), replicas=0)
    simulation.run([0] * 20 + [3] + [0] * 5)
    assert simulation.peaks[19] == 0
    assert simulation.peaks[20] == 1


def test_silence_takes_nothing_away() -> None:
    simulation = Simulation(Policy(min_replicas=0, max_replicas=9, idle_seconds=20, scale_down_delay_seconds=20), replicas=5)
    simulation.run([0] * 600, silent=lambda second: second > 5)
    assert simulation.peaks[-1] == 5


def test_a_fresh_autoscaler_takes_nothing_away_before_it_has_looked_long_enough() -> None:
    simulation = Simulation(Policy(max_replicas=9, scale_down_delay_seconds=120), replicas=6)
    simulation.run(steady(1, 300))
    assert set(simulation.peaks[:119]) == {6}
    assert simulation.peaks[-1] == 1


def test_the_larger_signal_wins() -> None:
    policy = Policy(max_replicas=9, target_in_flight=100, target_requests_per_second=5)
    simulation = Simulation(policy, slots=100)
    simulation.run(steady(18, 120))
    assert simulation.peaks[-1] == 4
    assert "requests/s over target 5" in simulation.log[-1]


@pytest.mark.parametrize(("minute", "bounds"), [(0, (1, 4)), (29, (1, 4)), (30, (3, 6)), (89, (3, 6)), (90, (1, 4))], ids=str)
def test_windows_are_bounds(minute: int, bounds: tuple[int, int]) -> None:
    window = Window(cron="30 12 * * *", minutes=60, min_replicas=3, max_replicas=6)
    policy = Policy(max_replicas=4, windows=(window,))
    assert policy.bounds(BEGAN + timedelta(minutes=minute)) == bounds


def test_windows_know_their_timezone() -> None:
    window = Window(cron="0 13 * * *", minutes=60, min_replicas=3, max_replicas=6, timezone="Europe/Berlin")
    assert window.is_open(BEGAN)
    assert not window.is_open(BEGAN + timedelta(hours=1))
    assert not window.is_open(BEGAN - timedelta(seconds=1))


def test_the_log_is_readable() -> None:
    lines: list[str] = []
    for name, arrivals in (("burst", burst()), ("day", day())):
        simulation = Simulation(Policy(min_replicas=0, max_replicas=12, idle_seconds=120, scale_down_delay_seconds=60))
        simulation.run([*arrivals, *[0] * 300])
        lines += [f"{name}:", *simulation.log, ""]
    assert "\n".join(lines) == GOLDEN.read_text()
