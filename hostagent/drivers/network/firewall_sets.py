"""Rules of a firewall as boxes that never overlap, which is what the kernel's interval sets take. Pure.

The one rule: a box is (protocols, ports, far addresses), each a closed range of numbers; the boxes of a set of rules cover
exactly the packets that one of the rules means. Ports of protocols without ports are not looked at: their boxes span all.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from hostagent.protocol.network import FirewallProtocol, FirewallRuleWanted

MAX_BOXES = 20_000
LAST_PORT = 65_535
LAST_PROTOCOL = 255
TCP, UDP = 6, 17
ICMP: dict[int, int] = {4: 1, 6: 58}
BITS = {4: 32, 6: 128}

Version = Literal[4, 6]
Range = tuple[int, int]


class Box(NamedTuple):
    protocols: Range
    ports: Range
    addresses: Range


class TooManyBoxes(ValueError):
    """Rules overlap in so many ways that the kernel's sets would be too large."""


def boxes(rules: Iterable[FirewallRuleWanted], version: Version, *, limit: int = MAX_BOXES) -> tuple[Box, ...]:
    """Sorted, without overlap, neighbours joined. Raises TooManyBoxes before it has spent much on them."""
    chosen = tuple(rules)
    layers: list[tuple[Range, tuple[tuple[Range, tuple[Range, ...]], ...]]] = []
    for protocols in _protocols(version):
        meant = tuple(rule for rule in chosen if _means(rule.protocol, protocols[0], version))
        layer = _ports(meant, protocols[0], version, limit)
        if layers and layers[-1][1] == layer and layers[-1][0][1] + 1 == protocols[0]:
            layers[-1] = ((layers[-1][0][0], protocols[1]), layer)
        else:
            layers.append((protocols, layer))
    return tuple(
        Box(protocols, ports, addresses) for protocols, layer in layers for ports, ranges in layer for addresses in ranges
    )


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, overlapping and touching ones joined."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def addresses_of(cidrs: Iterable[str], version: Version) -> tuple[Range, ...]:
    """The prefixes of this family as merged ranges."""
    return merged(_range(cidr) for cidr in cidrs if _version(cidr) == version)


def range_text(addresses: Range, version: Version) -> str:
    """As nft writes it: one address, a prefix, or first-last."""
    first, last = addresses
    size = last - first + 1
    start = _address(first, version)
    if size == 1:
        return start
    if size & (size - 1) == 0 and first % size == 0:
        return f"{start}/{BITS[version] - size.bit_length() + 1}"
    return f"{start}-{_address(last, version)}"


def box_text(box: Box, version: Version) -> str:
    """As an element of `inet_proto . inet_service . ipv4_addr|ipv6_addr`."""
    protocols, ports = (f"{first}" if first == last else f"{first}-{last}" for first, last in (box.protocols, box.ports))
    return f"{protocols} . {ports} . {range_text(box.addresses, version)}"


def _protocols(version: Version) -> tuple[Range, ...]:
    """All protocol numbers, cut where a rule can tell them apart."""
    known = sorted((TCP, UDP, ICMP[version]))
    cuts = sorted({0, *known, *(number + 1 for number in known)})
    return tuple((first, last - 1) for first, last in zip(cuts, (*cuts[1:], LAST_PROTOCOL + 1), strict=True))


def _means(protocol: FirewallProtocol, number: int, version: Version) -> bool:
    return protocol == "any" or {"tcp": TCP, "udp": UDP, "icmp": ICMP[version]}[protocol] == number


def _ports(
    rules: Sequence[FirewallRuleWanted], protocol: int, version: Version, limit: int
) -> tuple[tuple[Range, tuple[Range, ...]], ...]:
    """(ports, far addresses) from low to high for one protocol; ports between rules' edges are alike."""
    spans = [_span(rule) if protocol in (TCP, UDP) else (0, LAST_PORT) for rule in rules]
    cuts = sorted({first for first, _ in spans} | {last + 1 for _, last in spans})
    far = [addresses_of(rule.cidrs, version) for rule in rules]
    cache: dict[tuple[int, ...], tuple[Range, ...]] = {}
    found: list[tuple[Range, tuple[Range, ...]]] = []
    for first, end in itertools.pairwise(cuts):
        covering = tuple(index for index, span in enumerate(spans) if span[0] <= first <= span[1])
        if covering not in cache:
            cache[covering] = merged(one for index in covering for one in far[index])
        ranges = cache[covering]
        if found and found[-1][1] == ranges and found[-1][0][1] + 1 == first:
            found[-1] = ((found[-1][0][0], end - 1), ranges)
        elif ranges:
            found.append(((first, end - 1), ranges))
            limit -= len(ranges)
            if limit < 0:
                raise TooManyBoxes
    return tuple(found)


def _span(rule: FirewallRuleWanted) -> Range:
    return (rule.port_first, rule.port_last) if rule.port_last else (0, LAST_PORT)


@lru_cache(maxsize=65_536)
def _range(cidr: str) -> Range:
    network = ipaddress.ip_network(cidr)
    return int(network.network_address), int(network.broadcast_address)


def _version(cidr: str) -> int:
    return 6 if ":" in cidr else 4


def _address(number: int, version: Version) -> str:
    return str(ipaddress.IPv4Address(number) if version == 4 else ipaddress.IPv6Address(number))
