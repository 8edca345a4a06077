"""Choosing prefixes and addresses. The one rule: pure functions of what is taken; the caller holds the lock."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

RESERVED_AT_START = 2
"""The first addresses of a subnet (its own and the customary gateway's) are never given to a machine."""


def ula_prefix() -> IPv6Network:
    """A random /48 of fd00::/8 (RFC 4193, section 3.2): two deployments that meet later do not collide."""
    return IPv6Network((bytes([0xFD]) + os.urandom(5) + bytes(10), 48))


def free_ipv4(pool: IPv4Network, prefix_length: int, taken: Iterable[IPv4Network]) -> IPv4Network | None:
    """The lowest free prefix of that length in the pool; None when the pool is full."""
    start = _lowest_gap(int(pool.network_address), int(pool.broadcast_address), 32 - prefix_length, taken)
    return None if start is None else IPv4Network((start, prefix_length))


def free_ipv6(pool: IPv6Network, taken: Iterable[IPv6Network]) -> IPv6Network | None:
    """The lowest free /64 of the pool; None when the pool is full."""
    start = _lowest_gap(int(pool.network_address), int(pool.broadcast_address), 64, taken)
    return None if start is None else IPv6Network((start, 64))


def _lowest_gap(first: int, last: int, size_bits: int, taken: Iterable[IPv4Network | IPv6Network]) -> int | None:
    size = 1 << size_bits
    at = first
    for start, end in sorted((int(net.network_address), int(net.broadcast_address)) for net in taken):
        if end < at:
            continue
        if start >= at + size:
            break
        at = (end + size) & ~(size - 1)
    return at if at + size - 1 <= last else None


def free_offset(subnet: IPv4Network, taken: Iterable[IPv4Address], resting: Sequence[int] = ()) -> int | None:
    """The lowest free host number of the subnet that does not rest; None when it is full.

    `resting`: host numbers that were given back a moment ago, who rests longest first; they come when there are no others.
    """
    base = int(subnet.network_address)
    used = {int(address) - base for address in taken}
    numbers = range(RESERVED_AT_START, subnet.num_addresses - 1)
    avoided = used | set(resting)
    fresh = next((offset for offset in numbers if offset not in avoided), None)
    if fresh is not None:
        return fresh
    return next((offset for offset in resting if offset in numbers and offset not in used), None)


def addresses_at(ipv4: IPv4Network, ipv6: IPv6Network, offset: int) -> tuple[IPv4Address, IPv6Address, str]:
    """Both addresses of host number `offset` and a MAC that is unique because the IPv4 address is."""
    address = ipv4.network_address + offset
    octets = ":".join(f"{octet:02x}" for octet in address.packed)
    return address, ipv6.network_address + offset, f"02:be:{octets}"


def parse_ipv4_cidr(text: str) -> IPv4Network:
    """A private prefix of 8 to 29 bits without host bits; ValueError with a sentence otherwise."""
    try:
        network = ip_network(text, strict=True)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network prefix: {error}") from error
    if not isinstance(network, IPv4Network):
        raise ValueError("must be an IPv4 prefix")  # noqa: TRY004 - pydantic takes ValueError as a wrong field
    shared = IPv4Network("100.64.0.0/10")
    if not (network.is_private or network.subnet_of(shared)) or network.is_loopback or network.is_link_local:
        raise ValueError("must lie in private address space (RFC 1918 or 100.64.0.0/10)")
    if not 8 <= network.prefixlen <= 29:
        raise ValueError("must have a prefix length of 8 to 29")
    return network
