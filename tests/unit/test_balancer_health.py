"""What knowledge makes of shares: probes, ends, silence, drains, ejections, ramps, circuits, the brake."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hostagent.drivers.network.balancer_circuit import CLOSED, HALF_OPEN, OPEN, Circuit, Counts
from hostagent.drivers.network.balancer_health import HALF_OPEN_SHARE, HELD, ServiceHealth
from hostagent.protocol.network import BackendWanted, CircuitWanted, ListenerWanted, LoadBalancerWanted, ProbeWanted
from hostagent.protocol.wanted import Generation

FOUR = tuple(BackendWanted(id=f"bk_{n}", ipv4=f"10.0.0.{n}", ipv6=f"fd00::{n}") for n in range(4))
PLAIN = LoadBalancerWanted(
    id="lb_1",
    generation=Generation(epoch=1, number=1),
    vips=("203.0.113.1", "2001:db8::1"),
    listeners=(ListenerWanted(protocol="tcp", port=443, target_port=8443),),
    backends=FOUR,
)
PROBED = replace(PLAIN, probe=ProbeWanted(kind="tcp"))


def of(wanted=PLAIN, *, assume_up=True):
    health = ServiceHealth(wanted, assume_up=assume_up)
    health.judge(0.0, 0.0)
    return health


def shares(health, now=0.0, wall=0.0, family=4):
    return {name[-1]: opinion.share for name, opinion in health.judge(now, wall)[family].items()}


def word(health, name, now=0.0, wall=0.0):
    return health.judge(now, wall)[4][name].word


def test_all_are_up():
    assert shares(of()) == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert shares(of(PROBED)) == {"0": 1, "1": 1, "2": 1, "3": 1}, "an agent that starts again trusts the one before"


def test_a_new_backend_waits_for_its_probe():
    health = of(PROBED, assume_up=False)
    assert set(shares(health).values()) == {0}
    health.facts["bk_1"].probed = {4: True, 6: False}
    assert shares(health) == {"0": 0, "1": 1, "2": 0, "3": 0}
    assert set(shares(health, family=6).values()) == {0}


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ({"is_ended": True}, "down: its machine ended"),
        ({"is_noticed": True}, "down: its host says that it ended"),
        ({"is_silent": True}, "down: nothing is heard of its host"),
        ({"probed": {4: False, 6: True}, "probe_reason": "status 503"}, "down: status 503"),
        ({"circuit": OPEN}, "circuit open"),
    ],
)
def test_whatever_speaks_against_it(fact, said):
    health = of(PROBED)
    for name, value in fact.items():
        setattr(health.facts["bk_2"], name, value)
    assert shares(health, 1.0) == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert word(health, "bk_2", 1.0) == said


def test_states_of_the_document():
    backends = (replace(FOUR[0], state="draining"), replace(FOUR[1], state="ejected", ejected_seconds=60), FOUR[2])
    health = of(replace(PLAIN, backends=(*backends, replace(FOUR[3], state="removed"))))
    health.facts["bk_1"].away_since = 1000.0
    assert shares(health, 0.0, 1000.0) == {"0": 0, "1": 0, "2": 1}
    assert health.next_change(0.0, 1000.0) == 60
    assert (word(health, "bk_0", 0.0, 1000.0), word(health, "bk_1", 0.0, 1000.0)) == ("draining", "ejected")
    assert shares(health, 60.0, 1060.0) == {"0": 0, "1": 1, "2": 1}, "its time is over"


def test_a_backend_that_returns_starts_slowly():
    health = of(replace(PLAIN, slow_start_seconds=10))
    assert shares(health)["0"] == 1
    health.facts["bk_0"].is_ended = True
    assert shares(health, 100.0)["0"] == 0
    health.facts["bk_0"].is_ended = False
    found = [shares(health, 101.0 + second)["0"] for second in range(12)]
    assert found == sorted(found)
    assert found[0] < 0.1
    assert found[9] < 1.0 == found[10]
    assert health.next_change(101.5, 0.0) == pytest.approx(0.5)


def fall(health, names, now, *, refused=()):
    for name in names:
        health.facts[name].probed = {4: False, 6: False}
        health.facts[name].refused = set(refused)
    return shares(health, now)


def rise(health, names, now):
    for name in names:
        health.facts[name].probed = {4: True, 6: True}
    return shares(health, now)


def test_more_than_half_at_once_are_kept_for_a_while():
    health = of(PROBED)
    assert fall(health, ["bk_0", "bk_1"], 10.0) == {"0": 0, "1": 0, "2": 1, "3": 1}, "half of them is no accident"
    assert fall(health, ["bk_2"], 10.5) == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert word(health, "bk_0", 10.5).startswith(f"held: {HELD}")
    assert health.brakes == 2, "for each address family"
    assert health.next_change(10.5, 0.0) == 60
    assert shares(health, 71.0) == {"0": 0, "1": 0, "2": 0, "3": 1}, "then it is believed"


def test_falls_that_are_not_at_once_are_believed():
    health = of(PROBED)
    for number, now in enumerate((10.0, 20.0, 30.0)):
        found = fall(health, [f"bk_{number}"], now)
    assert found == {"0": 0, "1": 0, "2": 0, "3": 1}


def test_the_last_one_is_kept_on_a_suspicion_and_not_against_a_proof():
    health = of(replace(PROBED, backends=FOUR[:1]))
    assert fall(health, ["bk_0"], 10.0) == {"0": 1}
    assert shares(health, 71.0) == {"0": 0}, "then it is believed"
    health = of(replace(PROBED, backends=FOUR[:1]))
    assert fall(health, ["bk_0"], 10.0, refused=(4, 6)) == {"0": 0}, "its machine says so itself"


def test_two_are_never_both_out_on_suspicions():
    health = of(replace(PROBED, backends=FOUR[:2]))
    assert fall(health, ["bk_0"], 10.0) == {"0": 0, "1": 1}
    assert fall(health, ["bk_1"], 30.0) == {"0": 0, "1": 1}, "not at once, but the last one"
    assert word(health, "bk_1", 30.0).startswith("held: ")
    assert rise(health, ["bk_0"], 31.0) == {"0": 1, "1": 0}, "we see again, so who is away is away"
    health = of(replace(PROBED, backends=FOUR[:2]))
    assert fall(health, ["bk_0", "bk_1"], 10.0) == {"0": 1, "1": 1}
    assert fall(health, ["bk_0"], 10.3, refused=(4, 6)) == {"0": 0, "1": 1}, "the one that is really away says so"
    assert rise(health, ["bk_0"], 15.0) == {"0": 1, "1": 0}


def test_refusals_are_believed_however_many():
    health = of(PROBED)
    assert fall(health, ["bk_0", "bk_1", "bk_2"], 10.0, refused=(4, 6)) == {"0": 0, "1": 0, "2": 0, "3": 1}
    assert health.brakes == 0


def test_a_hold_ends_when_half_are_well_again():
    health = of(PROBED)
    assert set(fall(health, ["bk_0", "bk_1", "bk_2"], 10.0).values()) == {1}
    assert rise(health, ["bk_0"], 12.0) == {"0": 1, "1": 0, "2": 0, "3": 1}


def test_a_machine_that_is_being_stopped_gets_nothing_new():
    health = of(replace(PROBED, backends=FOUR[:2]))
    health.facts["bk_0"].is_leaving = True
    assert (shares(health, 10.0), word(health, "bk_0", 10.0)) == ({"0": 0, "1": 1}, "leaving")
    assert fall(health, ["bk_0"], 11.0, refused=(4,)) == {"0": 0, "1": 1}
    assert word(health, "bk_0", 11.0) == "leaving", "its flows are let end by its guest"
    assert fall(health, ["bk_1"], 11.1) == {"0": 0, "1": 1}, "it was the last one but for who leaves"
    health.facts["bk_0"].is_ended = True
    assert word(health, "bk_0", 12.0) == "down: its machine ended"


def test_ends_that_a_try_confirms_are_not_kept():
    health = of()
    for name in ("bk_0", "bk_1", "bk_2"):
        health.facts[name].is_ended = True
    assert set(shares(health, 5.0).values()) == {1}
    for name in ("bk_0", "bk_1", "bk_2"):
        health.facts[name].is_refuted = True
    assert shares(health, 5.2) == {"0": 0, "1": 0, "2": 0, "3": 1}


def test_held_backends_that_recover_are_simply_up():
    health = of(replace(PROBED, slow_start_seconds=10))
    fall(health, ["bk_0", "bk_1", "bk_2"], 10.0)
    for facts in health.facts.values():
        facts.probed = {4: True, 6: True}
    assert set(shares(health, 11.0).values()) == {1}
    assert word(health, "bk_0", 11.0) == "up"


WANTED = CircuitWanted(errors=5, window_ms=10_000, open_ms=3_000)


def run(circuit, *samples):
    """States after samples of (time, flows, accepted, refused, resets)."""
    found = []
    for now, *counts in samples:
        circuit.look(WANTED, Counts(**dict(zip(("flows", "accepted", "refused", "resets"), counts, strict=True))), now)
        found.append(circuit.state)
    return found


@pytest.mark.parametrize("last", [(14, 14, 0, 5), (14, 9, 5, 0), (15, 10, 0, 0)], ids=["resets", "refused", "unanswered"])
def test_errors_open_the_circuit(last):
    circuit = Circuit()
    assert run(circuit, (0.0, 0, 0, 0, 0), (1.0, 10, 10, 0, 0), (2.0, *last), (3.1, *last))[-1] == OPEN


def test_few_or_old_errors_do_not():
    assert set(run(Circuit(), (0.0, 0, 0, 0, 0), (1.0, 10, 10, 0, 4), (9.0, 20, 20, 0, 4), (15.0, 30, 30, 0, 8))) == {CLOSED}
    assert run(Circuit(), (0.0, 100, 90, 5, 5), (1.0, 0, 0, 0, 0), (2.0, 1, 1, 0, 0))[-1] == CLOSED, "a table written anew"


def test_flows_in_the_last_second_are_not_yet_failed():
    assert set(run(Circuit(), (0.0, 0, 0, 0, 0), (1.0, 0, 0, 0, 0), (1.5, 50, 0, 0, 0))) == {CLOSED}


def test_half_open_is_proven_or_opened_again():
    circuit = Circuit()
    run(circuit, (0.0, 0, 0, 0, 0), (1.0, 10, 10, 0, 9))
    assert circuit.state == OPEN
    assert run(circuit, (2.0, 10, 10, 0, 9), (4.1, 10, 10, 0, 9)) == [OPEN, HALF_OPEN]
    assert HALF_OPEN == HALF_OPEN_SHARE
    assert run(circuit, (5.0, 11, 11, 0, 10)) == [OPEN], "one error is enough"
    assert run(circuit, (8.1, 11, 11, 0, 10), (9.0, 13, 13, 0, 10), (10.2, 14, 14, 0, 10)) == [HALF_OPEN, HALF_OPEN, CLOSED]
