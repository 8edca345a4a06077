"""Counters of edges to figures of the API: sums, rates, and what happens when a table began anew."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from controlplane.core.json import Json
from controlplane.resources.loadbalancer.traffic import measured, summed
from hostagent.protocol.verbs import BackendTraffic

NOW = datetime(2026, 12, 1, tzinfo=UTC)
FIRST = BackendTraffic(id="nic_1", bytes_in=1000, bytes_out=50_000, packets_in=10, packets_out=40, flows=5, live_flows=2)


def later(seconds: float, **counts: int) -> dict[str, Json]:
    before = measured([FIRST], None, NOW)
    more = {name: getattr(FIRST, name) + counts.get(name, 0) for name in ("bytes_in", "bytes_out", "flows")}
    said = BackendTraffic(id="nic_1", packets_in=10, packets_out=40, **more)
    return measured([said], before, NOW + timedelta(seconds=seconds))


def test_a_first_look_says_no_rate():
    found = summed([measured([FIRST], None, NOW)["nic_1"]])
    assert found
    assert (found["flows"], found["live_flows"], found["flows_per_second"]) == (5, 2, 0.0)
    assert summed([None]) is summed([]) is None


def test_rates_are_between_two_looks_and_edges_add_up():
    one = later(10, bytes_in=500, bytes_out=20_000, flows=4)["nic_1"]
    found = summed([one, one])
    assert found
    assert (found["bytes_in_per_second"], found["bytes_out_per_second"], found["flows_per_second"]) == (100, 4000, 0.8)
    assert (found["bytes_out"], found["live_flows"]) == (140_000, None), "one edge has too many flows to count them"


def test_two_looks_in_a_moment_are_one():
    assert later(0.5, bytes_in=500) == measured([FIRST], None, NOW)


def test_a_counter_that_fell_says_no_rate():
    one = later(10, bytes_in=-500, flows=4)["nic_1"]
    assert isinstance(one, dict)
    assert (one["bytes_in"], "bytes_in_per_second" in one) == (500, False)
