"""What flows in the flowtable carried, out of what their entries say each time one looks."""

from __future__ import annotations

from hostagent.drivers.network.balancer_kernel import Carried
from hostagent.drivers.network.balancer_long import LongFlows
from hostagent.drivers.network.balancer_rules import OFFLOADED, OFFLOADED_FROM_BYTES

MARK = OFFLOADED | 7


def test_the_rules_share_is_taken_off_once_and_differences_are_added() -> None:
    long, total = LongFlows(), 4 * OFFLOADED_FROM_BYTES
    long.count([(b"1", MARK, Carried(100, total // 4, 300, 3 * total // 4))])
    assert long.sums == {"lb_in": {7: (75, 3 * total // 16)}, "lb_out": {7: (225, 9 * total // 16)}}
    long.count([(b"1", MARK, Carried(110, total // 4 + 1000, 320, 3 * total // 4 + 5000))])
    assert long.sums == {"lb_in": {7: (85, 3 * total // 16 + 1000)}, "lb_out": {7: (245, 9 * total // 16 + 5000)}}


def test_an_id_that_comes_again_is_another_flow() -> None:
    long = LongFlows()
    long.count([(b"1", MARK, Carried(100, OFFLOADED_FROM_BYTES, 0, 0))])
    long.count([])
    assert long.sums["lb_in"] == {7: (0, 0)}
    long.count([(b"1", MARK, Carried(50, 2 * OFFLOADED_FROM_BYTES, 0, 0))])
    long.count([(b"1", MARK, Carried(40, 2 * OFFLOADED_FROM_BYTES, 0, 0))])
    assert long.sums["lb_in"] == {7: (45, 2 * OFFLOADED_FROM_BYTES)}


def test_marks_of_nobody_are_forgotten() -> None:
    long = LongFlows()
    long.count([(b"1", MARK, Carried(1, OFFLOADED_FROM_BYTES + 5, 0, 0)), (b"2", MARK + 1, Carried(1, 9, 0, 0))])
    long.keep({8: None})
    assert long.sums == {"lb_in": {8: (0, 0)}, "lb_out": {8: (0, 0)}}
