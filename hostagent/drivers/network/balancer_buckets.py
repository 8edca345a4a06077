"""Which backend owns which of a service's 251 buckets: Maglev's permutations (NSDI 2016, section 3.4), dealt out by quota.

The one rule: the answer depends on nothing but the backends' ids, weights and shares, so that every edge host chooses alike
without asking another. It is made in two steps: `fill` gives every backend of the document its home buckets; `share_out` lends
the homes of those that are away to the others. So the end of one of N backends moves its own 1/N of the flows and no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

BUCKETS = 251
SEED = 0x5EED  # of the kernel's jhash; the same on every edge host

Table = tuple[str, ...]
"""The owner of each bucket; "" = nobody."""


@lru_cache(maxsize=1024)
def permutation(backend_id: str) -> bytes:
    """The order in which a backend likes the buckets, one byte each. BUCKETS is prime, so every step size reaches them all."""
    digest = hashlib.blake2b(backend_id.encode(), digest_size=16).digest()
    offset = int.from_bytes(digest[:8], "big") % BUCKETS
    skip = int.from_bytes(digest[8:], "big") % (BUCKETS - 1) + 1
    return bytes((offset + turn * skip) % BUCKETS for turn in range(BUCKETS))


def fill(weights: Mapping[str, int]) -> Table:
    """Homes. Each backend gets its weight's part of the buckets, rounded, and at least one. At most BUCKETS backends."""
    if len(weights) > BUCKETS:
        raise ValueError(f"{len(weights)} backends do not fit in {BUCKETS} buckets")
    owners = [""] * BUCKETS
    _deal(owners, range(BUCKETS), weights)
    return tuple(owners)


def share_out(homes: Table, weights: Mapping[str, int], shares: Mapping[str, float]) -> Table:
    """The table in use. `shares`: which part of its homes a backend takes now, from 0 (away) to 1; 1 where it is not named.

    What is not taken is dealt to backends with a whole share; when there is none, the largest share counts as whole.
    """
    largest = max((shares.get(name, 1.0) for name in weights), default=0.0)
    if largest <= 0.0:
        return ("",) * BUCKETS
    lessened = {name: share / largest for name in sorted(weights) if (share := shares.get(name, 1.0)) < largest}
    if not lessened:
        return homes
    owners = list(homes)
    takers = dict(weights)
    for name, share in lessened.items():
        del takers[name]
        # Those that are dealt with later take part, so that one more absence does not reshuffle what this one left.
        _deal(owners, _free(owners, homes, name, share), takers)
    return tuple(owners)


def moved(before: Sequence[str], after: Sequence[str]) -> tuple[int, ...]:
    """The buckets whose owner differs."""
    return tuple(bucket for bucket, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)


def _free(owners: list[str], homes: Table, name: str, share: float) -> list[int]:
    """Take from `name` all but its share of its homes, the ones that it likes least first; answers them in order."""
    liked = [bucket for bucket in permutation(name) if homes[bucket] == name]
    kept = set(liked[: math.ceil(len(liked) * share)])
    freed = [bucket for bucket, owner in enumerate(owners) if owner == name and bucket not in kept]
    for bucket in freed:
        owners[bucket] = ""
    return freed


def _deal(owners: list[str], free: Sequence[int], weights: Mapping[str, int]) -> None:
    """Give the free buckets to the backends in turns; each takes the one it likes best of what is left."""
    if not weights or not free:
        return
    quotas = _quotas(len(free), weights)
    turns = sorted(((turn + 1) / quota, name) for name, quota in quotas.items() for turn in range(quota))
    left, reached = set(free), dict.fromkeys(quotas, 0)
    for _, name in turns:
        liked, at = permutation(name), reached[name]
        while liked[at] not in left:
            at += 1
        owners[liked[at]] = name
        left.discard(liked[at])
        reached[name] = at + 1


def _quotas(count: int, weights: Mapping[str, int]) -> dict[str, int]:
    """How many of `count` each gets: by largest remainder, and one at least where that is possible."""
    total = sum(weights.values())
    quotas = {name: weight * count // total for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: (-(weights[name] * count % total), name))
    for name in by_remainder[: count - sum(quotas.values())]:
        quotas[name] += 1
    if len(weights) <= count:
        for name in sorted(name for name, quota in quotas.items() if quota == 0):
            richest = min(quotas, key=lambda other: (-quotas[other], other))
            quotas[richest] -= 1
            quotas[name] = 1
    return quotas
