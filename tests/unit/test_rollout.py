"""The arithmetic of roll-outs: replicas made and taken away, shares, reasons to go back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.metering import latency
from controlplane.resources.endpoint.rollout import Body, Rollout, Strategy, Traffic, decide

NOTHING = (Traffic(), Traffic())
QUICK = Strategy(watch_seconds=10, ramp_seconds=10)


def old(count: int, *, ready: bool = True) -> list[Body]:
    return [Body(id=f"old-{number}", is_new=False, is_ready=ready) for number in range(count)]


def new(ready: int, starting: int = 0) -> list[Body]:
    return [Body(id=f"new-{number}", is_new=True, is_ready=number < ready) for number in range(ready + starting)]


def begun(strategy: Strategy = QUICK, **stored: Any) -> Rollout:
    return Rollout(from_revision=1, strategy=strategy, began_at=0.0, **stored)


def test_one_new_replica_first_and_the_rest_after_it_was_watched() -> None:
    first = decide(begun(), old(4), 4, NOTHING, 1)
    assert (first.create, list(first.remove), first.rollout.share) == (1, [], 0.0)
    watching = decide(first.rollout, [*old(4), *new(1)], 4, NOTHING, 2)
    assert (watching.create, list(watching.remove), watching.rollout.share) == (0, [], 10.0)
    promoted = decide(watching.rollout, [*old(4), *new(1)], 4, NOTHING, 12)
    assert promoted.rollout.promoted_at == 12
    assert not promoted.remove
    ramping = decide(promoted.rollout, [*old(4), *new(1)], 4, NOTHING, 17)
    assert ramping.rollout.share == 15  # half-way from 10 to one of five
    after = decide(ramping.rollout, [*old(4), *new(1)], 4, NOTHING, 22)
    assert (after.rollout.share, after.create, len(after.remove)) == (None, 0, 1)
    assert decide(after.rollout, [*old(3), *new(1)], 4, NOTHING, 23).create == 1
    assert decide(after.rollout, new(4), 4, NOTHING, 40).is_done


def test_held_until_promoted() -> None:
    rollout = begun(replace(QUICK, is_held=True))
    for now in (1, 100, 10_000):
        move = decide(rollout, [*old(1), *new(1)], 1, NOTHING, now)
        rollout = move.rollout
        assert (move.remove, move.rollout.promoted_at, move.rollout.share) == ([], None, 10.0)


def test_without_a_surge_an_old_one_goes_first() -> None:
    strategy = replace(QUICK, max_surge=0, max_unavailable=1)
    move = decide(begun(strategy), old(2), 2, NOTHING, 1)
    assert (move.create, len(move.remove)) == (0, 1)
    assert decide(begun(strategy), old(1), 2, NOTHING, 1).create == 1
    assert decide(begun(strategy), [*old(1), *new(0, 1)], 2, NOTHING, 1).remove == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (Body(id="new-0", is_new=True, is_ready=False, is_unhealthy=True, failure="it answers 500"), "it answers 500"),
        (Body(id="new-0", is_new=True, is_ready=False, failure="vm.failed: no room", since=-1e9), "vm.failed: no room"),
        (Body(id="new-0", is_new=True, is_ready=False, since=-1e9), "not ready within 1800 s"),
    ],
)
def test_a_replica_that_fails_is_a_reason_to_go_back(body: Body, words: str) -> None:
    assert words in decide(begun(), [*old(1), body], 1, NOTHING, 1).back


def test_one_that_waits_for_room_is_none() -> None:
    body = Body(id="new-0", is_new=True, is_ready=False, is_waiting=True, since=-1e9)
    assert not decide(begun(), [*old(1), body], 1, NOTHING, 1).back


@pytest.mark.parametrize(
    ("new_traffic", "old_traffic", "words"),
    [
        (Traffic(requests=19, failures=19), Traffic(), ""),
        (Traffic(requests=20, failures=2), Traffic(requests=100), "2 of 20 requests failed (10 %)"),
        (Traffic(requests=20, failures=2), Traffic(requests=100, failures=8), ""),
        (Traffic(ttft_p95_ms=500, ttft_count=20), Traffic(ttft_p95_ms=100, ttft_count=20), "up to 500 ms, before it 100 ms"),
        (Traffic(ttft_p95_ms=500, ttft_count=19), Traffic(ttft_p95_ms=100, ttft_count=20), ""),
        (Traffic(ttft_p95_ms=100, ttft_count=20), Traffic(ttft_p95_ms=10, ttft_count=20), ""),
    ],
)
def test_errors_and_slowness_are_compared_with_before(new_traffic: Traffic, old_traffic: Traffic, words: str) -> None:
    back = decide(begun(), [*old(1), *new(1)], 1, (new_traffic, old_traffic), 1).back
    assert (words in back) if words else not back


def test_going_back_takes_the_failed_ones_away_at_once() -> None:
    rollout = begun(is_back=True, promoted_at=0.0)
    failed = [Body(id="failed", is_new=False, is_ready=True)]
    move = decide(rollout, [*failed, *new(1)], 1, (Traffic(requests=99, failures=99), Traffic()), 1)
    assert (list(move.remove), move.back, move.rollout.share) == (failed, "", 100.0)
    assert decide(move.rollout, new(1), 1, NOTHING, 1).is_done


def test_scaled_to_nothing_meanwhile_it_is_over() -> None:
    assert len(decide(begun(), old(2), 0, NOTHING, 1).remove) == 2
    assert decide(begun(), [], 0, NOTHING, 1).is_done


@given(
    wanted=st.integers(1, 6),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    ready=st.lists(st.booleans(), min_size=1, max_size=400),
)
def test_it_comes_to_its_end_and_never_takes_away_what_is_needed(
    wanted: int, surge: int, unavailable: int, ready: list[bool]
) -> None:
    """Replicas become ready after any delay; the bounds hold at every moment, and it ends."""
    strategy = Strategy(max_surge=surge, max_unavailable=max(unavailable, int(not surge)), watch_seconds=2, ramp_seconds=2)
    rollout, bodies, made, pace = begun(strategy), old(wanted), 0, iter([*ready, *[True] * 200])
    for now in range(1, 600):
        bodies = [replace(body, is_ready=body.is_ready or next(pace, True)) for body in bodies]
        move = decide(rollout, bodies, wanted, NOTHING, now)
        rollout = move.rollout
        if move.is_done:
            assert all(body.is_new for body in bodies)
            assert len(bodies) == wanted
            return
        gone = {body.id for body in move.remove}
        left = [body for body in bodies if body.id not in gone]
        if any(body.is_ready for body in move.remove):
            assert sum(body.is_ready for body in left) >= wanted - strategy.max_unavailable
        bodies = [*left, *(Body(id=f"new-{made + n}", is_new=True, is_ready=False) for n in range(move.create))]
        made += move.create
        assert len(bodies) <= wanted + surge
    raise AssertionError("it did not end")


def test_times_are_counted_in_buckets() -> None:
    counts = latency.none()
    for seconds in (0.005, 0.005, 0.02, 90.0):
        counts[latency.bucket(seconds)] += 1
    assert (counts[0], counts[1], counts[-1]) == (2, 1, 1)
    assert latency.percentile_ms(counts, 0.5) == 10.0
    assert latency.percentile_ms(counts, 0.95) == 120_000.0
    assert latency.percentile_ms(latency.none(), 0.95) is None
