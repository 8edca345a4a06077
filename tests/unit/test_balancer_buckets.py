"""Buckets: even by weight, the same everywhere, and an absence moves nobody else's flows."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostagent.drivers.network.balancer_buckets import BUCKETS, fill, moved, share_out

NAMES = st.text("abcdefghjkmnpqrstvwxyz0123456789", min_size=6, max_size=12)
WEIGHTS = st.dictionaries(NAMES, st.integers(1, 256), min_size=1, max_size=40)


@given(WEIGHTS)
def test_every_backend_has_its_part(weights):
    counts = Counter(fill(weights))
    total = sum(weights.values())
    ideals = {name: weight * BUCKETS / total for name, weight in weights.items()}
    lifted = sum(1 - ideal for ideal in ideals.values() if ideal < 1)
    for name, ideal in ideals.items():
        assert counts[name] >= 1
        assert abs(counts[name] - ideal) < 1 or ideal < 1 or lifted, (name, counts[name], ideal)
        assert counts[name] - ideal < 1
    assert sum(counts.values()) == BUCKETS


@given(WEIGHTS, st.randoms())
def test_the_order_of_a_document_does_not_matter(weights, chance):
    shuffled = list(weights.items())
    chance.shuffle(shuffled)
    assert fill(dict(shuffled)) == fill(weights)


def test_another_process_chooses_alike():
    """String hashing differs from process to process; the table must not."""
    words = "from hostagent.drivers.network.balancer_buckets import fill; print(fill({'a': 3, 'b': 1, 'c': 256}))"
    done = subprocess.run([sys.executable, "-c", words], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(fill({"a": 3, "b": 1, "c": 256}))


@settings(max_examples=300)
@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.data())
def test_an_absence_moves_its_own_flows_only(weights, data):
    homes = fill(weights)
    away = data.draw(st.sampled_from(sorted(weights)))
    table = share_out(homes, weights, {away: 0.0})
    assert {homes[bucket] for bucket in moved(homes, table)} == {away}
    assert away not in table
    assert "" not in table
    others = {name: weight for name, weight in weights.items() if name != away}
    counts, home_counts, total = Counter(table), Counter(homes), sum(others.values())
    for name, weight in others.items():
        assert counts[name] - home_counts[name] <= weight * home_counts[away] / total + 2


@given(WEIGHTS.filter(lambda weights: len(weights) > 2), st.data())
def test_a_second_absence_leaves_most_of_the_first_in_place(weights, data):
    """The later one in the order of ids is dealt with last: nothing else moves at all."""
    first, second = sorted(data.draw(st.sets(st.sampled_from(sorted(weights)), min_size=2, max_size=2)))
    homes = fill(weights)
    before = share_out(homes, weights, {first: 0.0})
    after = share_out(homes, weights, {first: 0.0, second: 0.0})
    assert {before[bucket] for bucket in moved(before, after)} == {second}
    assert not {first, second} & set(after)


@given(WEIGHTS)
def test_all_away_is_nobody(weights):
    assert set(share_out(fill(weights), weights, dict.fromkeys(weights, 0.0))) == {""}


@given(WEIGHTS.filter(lambda weights: len(weights) > 1), st.floats(0.01, 0.99), st.data())
def test_a_part_is_kept_and_grows(weights, share, data):
    name = data.draw(st.sampled_from(sorted(weights)))
    homes = fill(weights)
    half = share_out(homes, weights, {name: share})
    count = homes.count(name)
    assert 1 <= half.count(name) <= int(count * share) + 1
    more = share_out(homes, weights, {name: min(1.0, share * 1.5)})
    kept = {bucket for bucket, owner in enumerate(half) if owner == name}
    assert all(more[bucket] == name for bucket in kept)


def test_only_partial_ones_share_everything():
    weights = {"a": 1, "b": 1}
    table = share_out(fill(weights), weights, {"a": 0.0, "b": 0.1})
    assert set(table) == {"b"}
    homes = fill(weights)
    assert share_out(homes, weights, {"a": 0.1, "b": 0.1}) == homes
    assert share_out(homes, weights, {"a": 0.1, "b": 0.2}).count("a") == 63


def test_too_many_backends_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        fill({str(number): 1 for number in range(BUCKETS + 1)})
