"""Elements of sets and maps as the kernel takes them.

The one rule: what cannot be said here (intervals of one field) is Unsupported, never guessed. A field of a concatenation is
padded to 32 bits. Source: Linux, include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

from hostagent.drivers.network.nfnetlink import LIST_ELEM, NESTED, attribute, nested, text
from hostagent.drivers.network.protocol import FieldType, SetSpec
from hostagent.drivers.network.table import TABLE

LIST_TABLE, LIST_SET, LIST_ELEMENTS = 1, 2, 3
ELEM_KEY, ELEM_DATA, ELEM_OBJREF, ELEM_KEY_END = 1, 2, 9, 10
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
VERDICTS = {"accept": 1, "drop": 0, "continue": -1, "jump": -3, "goto": -4, "return": -5}
PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58}
LIST_BYTES = 40_000  # of one message: a netlink attribute ends at 64 KiB

_NUMBER_BYTES: dict[str, int] = {"inet_proto": 1, "inet_service": 2, "number128": 16, "ipv4_addr": 4, "ipv6_addr": 16}


class Unsupported(ValueError):
    """The change goes by nft."""


def elements(name: str, spec: SetSpec, pairs: Mapping[str, str], *, is_removal: bool) -> Iterator[bytes]:
    """The bodies of as many messages as it takes. Raises Unsupported."""
    is_interval = "interval" in spec.declaration
    if is_interval and len(spec.key) == 1:
        raise Unsupported("an interval of one field is two elements with neighbours")
    head = attribute(LIST_TABLE, text(TABLE)) + attribute(LIST_SET, text(name))
    listed = bytearray()
    for key, value in pairs.items():
        listed += _listed(_element(spec, key, "" if is_removal else value, is_interval))
        if len(listed) > LIST_BYTES:
            yield head + nested(LIST_ELEMENTS, bytes(listed))
            listed.clear()
    if listed:
        yield head + nested(LIST_ELEMENTS, bytes(listed))


def _element(spec: SetSpec, key: str, value: str, is_interval: bool) -> bytes:
    first, last = _range(spec.key, key)
    body = _head(ELEM_KEY | NESTED, len(first)) + first + b"\0" * (-len(first) % 4)
    if is_interval:
        body += nested(ELEM_KEY_END, attribute(DATA_VALUE, last))
    elif first != last:
        raise Unsupported(f"{key} is a range")
    if not value:
        return body
    if spec.data == ("verdict",):
        return body + nested(ELEM_DATA, nested(DATA_VERDICT, verdict(value)))
    if spec.data == ("name",):
        return body + attribute(ELEM_OBJREF, text(value.strip('"')))
    return body + _data(spec.data, value)


@lru_cache(maxsize=64)
def _head(kind: int, size: int) -> bytes:
    """What stands before a value of `size` bytes in an attribute that holds nothing else."""
    padded = (size + 3) & ~3
    return attribute(kind, attribute(DATA_VALUE, bytes(padded)))[:4] + attribute(DATA_VALUE, bytes(size))[:4]


@lru_cache(maxsize=64)
def _element_head(size: int) -> bytes:
    return attribute(LIST_ELEM | NESTED, bytes(size))[:4]


def _listed(element: bytes) -> bytes:
    """As one of a list. Elements end at multiples of four bytes."""
    return _element_head(len(element)) + element


@lru_cache(maxsize=64)
def _data(types: tuple[FieldType, ...], value: str) -> bytes:
    return nested(ELEM_DATA, attribute(DATA_VALUE, _range(types, value)[0]))


def _range(types: tuple[FieldType, ...], words: str) -> tuple[bytes, bytes]:
    """First and last of what the text means, fields padded as the kernel keeps them. Raises Unsupported."""
    if len(types) == 1:
        return field(types[0], words)
    before, _, final = words.rpartition(" . ")
    head, tail = _joined(types[:-1], before), field(types[-1], final)
    padding = b"\0" * (-len(tail[0]) % 4)
    return head[0] + tail[0] + padding, head[1] + tail[1] + padding


@lru_cache(maxsize=64)  # a bucket swap says the same address, protocol and port 126 times
def _joined(types: tuple[FieldType, ...], words: str) -> tuple[bytes, bytes]:
    fields = words.split(" . ")
    if len(fields) != len(types):
        raise Unsupported(f"{words} has not {len(types)} fields")
    first = last = b""
    for kind, one_field in zip(types, fields, strict=True):
        one, other = field(kind, one_field)
        padding = b"\0" * (-len(one) % 4)
        first += one + padding
        last += other + padding
    return first, last


@lru_cache(maxsize=512)  # the numbers of all buckets, and what stands before them
def field(kind: FieldType, words: str) -> tuple[bytes, bytes]:
    """First and last of the values that the words mean, which are mostly one. Raises Unsupported."""
    try:
        if kind == "ifname":
            name = words.strip('"').encode()
            return _same(name.ljust(16, b"\0"))
        if kind == "ether_addr":
            return _same(bytes.fromhex(words.replace(":", "")))
        if kind in ("mark", "number"):
            return _same(int(words, 0).to_bytes(4, sys.byteorder))
        if kind in _NUMBER_BYTES:
            first, last = _numbers(kind, words)
            size = _NUMBER_BYTES[kind]
            return first.to_bytes(size, "big"), last.to_bytes(size, "big")
    except (ValueError, OverflowError) as error:
        raise Unsupported(f"{words!r} as {kind}: {error}") from error
    raise Unsupported(f"no fields of type {kind}")


def _same(value: bytes) -> tuple[bytes, bytes]:
    return value, value


def _numbers(kind: FieldType, words: str) -> tuple[int, int]:
    if kind in ("ipv4_addr", "ipv6_addr"):
        if "/" in words:
            network = ipaddress.ip_network(words)
            return int(network.network_address), int(network.broadcast_address)
        first, _, last = words.partition("-")
        return int(ipaddress.ip_address(first)), int(ipaddress.ip_address(last or first))
    if words in PROTOCOLS:
        return PROTOCOLS[words], PROTOCOLS[words]
    if kind == "number128":
        return int(words, 0), int(words, 0)
    first, _, last = words.partition("-")
    return int(first), int(last or first)


def verdict(words: str) -> bytes:
    """`drop`, `goto x`, … as the attributes of a verdict. Raises Unsupported."""
    word, _, chain = words.partition(" ")
    if word not in VERDICTS:
        raise Unsupported(f"no verdict {words}")
    code = (VERDICTS[word] & 0xFFFF_FFFF).to_bytes(4, "big")
    return attribute(VERDICT_CODE, code) + (attribute(VERDICT_CHAIN, text(chain)) if chain else b"")
