"""Prefixes and addresses are chosen without overlap, lowest first, and an empty pool is said to be empty."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.resources.network import allocate

POOL = IPv4Network("10.192.0.0/20")
subnets = st.integers(20, 28).flatmap(
    lambda bits: st.integers(0, (1 << (bits - 20)) - 1).map(
        lambda at: IPv4Network((int(POOL.network_address) + (at << (32 - bits)), bits))
    )
)


@given(taken=st.lists(subnets, max_size=12), prefix_length=st.integers(20, 28))
def test_a_free_prefix_overlaps_nothing_and_is_found_when_there_is_one(taken: list[IPv4Network], prefix_length: int) -> None:
    found = allocate.free_ipv4(POOL, prefix_length, taken)
    fitting = [net for net in POOL.subnets(new_prefix=prefix_length) if not any(net.overlaps(other) for other in taken)]
    assert found == (fitting[0] if fitting else None)


def test_ipv6_prefixes_are_64s_of_the_pool() -> None:
    pool = IPv6Network("fd12:3456:789a::/48")
    first = allocate.free_ipv6(pool, [])
    assert first == IPv6Network("fd12:3456:789a::/64")
    assert allocate.free_ipv6(pool, [first]) == IPv6Network("fd12:3456:789a:1::/64")


def test_a_ula_prefix_is_a_random_48_of_fd00() -> None:
    one, other = allocate.ula_prefix(), allocate.ula_prefix()
    assert one.prefixlen == 48
    assert one.subnet_of(IPv6Network("fd00::/8"))
    assert one != other


def test_addresses_of_a_subnet_until_it_is_full() -> None:
    subnet = IPv4Network("10.192.0.0/29")
    taken: list[IPv4Address] = []
    while (offset := allocate.free_offset(subnet, taken)) is not None:
        ipv4, ipv6, mac = allocate.addresses_at(subnet, IPv6Network("fd00::/64"), offset)
        assert ipv4 in subnet
        assert int(ipv6) & 0xFFFF == offset
        assert mac.startswith("02:be:0a:c0:00:")
        taken.append(ipv4)
    assert [str(address) for address in taken] == [f"10.192.0.{n}" for n in range(2, 7)]


def test_addresses_that_rest_come_last_and_who_rests_longest_first() -> None:
    subnet = IPv4Network("10.192.0.0/29")
    taken = [subnet.network_address + 2, subnet.network_address + 5]
    assert allocate.free_offset(subnet, taken, [3, 4]) == 6
    taken.append(subnet.network_address + 6)
    assert allocate.free_offset(subnet, taken, [4, 2, 3]) == 4
    assert allocate.free_offset(subnet, taken, [2, 99]) == 3
    taken.append(subnet.network_address + 3)
    assert allocate.free_offset(subnet, taken, [2, 99, 4]) == 4
    assert allocate.free_offset(subnet, [*taken, subnet.network_address + 4], [4, 99]) is None


@pytest.mark.parametrize("text", ["10.0.0.0", "10.0.0.1/24", "8.8.8.0/24", "fd00::/64", "127.0.0.0/24", "10.0.0.0/30", "x"])
def test_wrong_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must|not a network"):
        allocate.parse_ipv4_cidr(text)
