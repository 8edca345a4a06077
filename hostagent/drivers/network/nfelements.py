"""Elements of sets and maps as the kernel takes them: the short way for changes that make nothing new.

The one rule: what cannot be said here (structure, intervals of one field) goes by nft; what can costs microseconds, because nft
would first ask the kernel for all sets and chains that there are. A field of a concatenation is padded to 32 bits.
Source: Linux, include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache

from hostagent.drivers.network.nfnetlink import FAMILIES, attribute
from hostagent.drivers.network.protocol import FieldType, RuleChange, SetSpec
from hostagent.drivers.network.table import TABLE, family_of

MSG_NEWSETELEM, MSG_DELSETELEM = 12, 14
NESTED = 0x8000
LIST_TABLE, LIST_SET, LIST_ELEMENTS, LIST_ELEM = 1, 2, 3, 1
ELEM_KEY, ELEM_DATA, ELEM_OBJREF, ELEM_KEY_END = 1, 2, 9, 10
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
VERDICTS = {"accept": 1, "drop": 0, "continue": -1, "jump": -3, "goto": -4, "return": -5}
PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58}
MAX_ELEMENTS = 5_000
LIST_BYTES = 40_000  # of one message: a netlink attribute ends at 64 KiB

_NUMBER_BYTES: dict[str, int] = {"inet_proto": 1, "inet_service": 2, "number128": 16, "ipv4_addr": 4, "ipv6_addr": 16}


class Unsupported(ValueError):
    """The change goes by nft."""


def messages_of(change: RuleChange) -> list[tuple[int, int, bytes]]:
    """(message type, family, body) in order. Raises Unsupported."""
    if change.has_structure or sum(map(len, (*change.removed.values(), *change.added.values()))) > MAX_ELEMENTS:
        raise Unsupported("not only a few elements")
    found = []
    for kind, sets in ((MSG_DELSETELEM, change.removed), (MSG_NEWSETELEM, change.added)):
        for name, pairs in sets.items():
            found += [(kind, FAMILIES[family_of(name)], body) for body in _bodies(name, change.specs[name], pairs, kind)]
    return found


def _bodies(name: str, spec: SetSpec, pairs: Mapping[str, str], kind: int) -> Iterator[bytes]:
    is_interval = "interval" in spec.declaration
    if is_interval and len(spec.key) == 1:
        raise Unsupported("an interval of one field is two elements with neighbours")
    head = attribute(LIST_TABLE, _text(TABLE)) + attribute(LIST_SET, _text(name))
    listed = bytearray()
    for key, value in pairs.items():
        listed += _nested(_element(spec, key, value if kind == MSG_NEWSETELEM else "", is_interval))
        if len(listed) > LIST_BYTES:
            yield head + attribute(LIST_ELEMENTS | NESTED, bytes(listed))
            listed.clear()
    if listed:
        yield head + attribute(LIST_ELEMENTS | NESTED, bytes(listed))


def _element(spec: SetSpec, key: str, value: str, is_interval: bool) -> bytes:
    first, last = _range(spec.key, key)
    body = _head(ELEM_KEY | NESTED, len(first)) + first + b"\0" * (-len(first) % 4)
    if is_interval:
        body += attribute(ELEM_KEY_END | NESTED, attribute(DATA_VALUE, last))
    elif first != last:
        raise Unsupported(f"{key} is a range")
    if not value:
        return body
    if spec.data == ("verdict",):
        return body + attribute(ELEM_DATA | NESTED, attribute(DATA_VERDICT | NESTED, _verdict(value)))
    if spec.data == ("name",):
        return body + attribute(ELEM_OBJREF, _text(value.strip('"')))
    return body + _data(spec.data, value)


@lru_cache(maxsize=64)
def _head(kind: int, size: int) -> bytes:
    """What stands before a value of `size` bytes in an attribute that holds nothing else."""
    padded = (size + 3) & ~3
    return attribute(kind, attribute(DATA_VALUE, bytes(padded)))[:4] + attribute(DATA_VALUE, bytes(size))[:4]


@lru_cache(maxsize=64)
def _element_head(size: int) -> bytes:
    return attribute(LIST_ELEM | NESTED, bytes(size))[:4]


def _nested(element: bytes) -> bytes:
    """As one of a list. Elements end at multiples of four bytes."""
    return _element_head(len(element)) + element


@lru_cache(maxsize=1024)
def _data(types: tuple[FieldType, ...], value: str) -> bytes:
    return attribute(ELEM_DATA | NESTED, attribute(DATA_VALUE, _range(types, value)[0]))


def _range(types: tuple[FieldType, ...], text: str) -> tuple[bytes, bytes]:
    """First and last of what the text means, fields padded as the kernel keeps them. Raises Unsupported."""
    if len(types) == 1:
        return _field(types[0], text)
    before, _, final = text.rpartition(" . ")
    head, tail = _joined(types[:-1], before), _field(types[-1], final)
    padding = b"\0" * (-len(tail[0]) % 4)
    return head[0] + tail[0] + padding, head[1] + tail[1] + padding


@lru_cache(maxsize=1024)  # a bucket swap says the same address, protocol and port 126 times
def _joined(types: tuple[FieldType, ...], text: str) -> tuple[bytes, bytes]:
    fields = text.split(" . ")
    if len(fields) != len(types):
        raise Unsupported(f"{text} has not {len(types)} fields")
    first = last = b""
    for kind, field in zip(types, fields, strict=True):
        one, other = _field(kind, field)
        padding = b"\0" * (-len(one) % 4)
        first += one + padding
        last += other + padding
    return first, last


@lru_cache(maxsize=4096)
def _field(kind: FieldType, text: str) -> tuple[bytes, bytes]:
    """First and last of the values that the text means, which are mostly one. Raises Unsupported."""
    try:
        if kind == "ifname":
            name = text.strip('"').encode()
            return _same(name.ljust(16, b"\0"))
        if kind == "ether_addr":
            return _same(bytes.fromhex(text.replace(":", "")))
        if kind in ("mark", "number"):
            return _same(int(text, 0).to_bytes(4, sys.byteorder))
        if kind in _NUMBER_BYTES:
            first, last = _numbers(kind, text)
            size = _NUMBER_BYTES[kind]
            return first.to_bytes(size, "big"), last.to_bytes(size, "big")
    except (ValueError, OverflowError) as error:
        raise Unsupported(f"{text!r} as {kind}: {error}") from error
    raise Unsupported(f"no fields of type {kind}")


def _same(value: bytes) -> tuple[bytes, bytes]:
    return value, value


def _numbers(kind: FieldType, text: str) -> tuple[int, int]:
    if kind in ("ipv4_addr", "ipv6_addr"):
        if "/" in text:
            network = ipaddress.ip_network(text)
            return int(network.network_address), int(network.broadcast_address)
        first, _, last = text.partition("-")
        return int(ipaddress.ip_address(first)), int(ipaddress.ip_address(last or first))
    if text in PROTOCOLS:
        return PROTOCOLS[text], PROTOCOLS[text]
    if kind == "number128":
        return int(text, 0), int(text, 0)
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def _verdict(text: str) -> bytes:
    word, _, chain = text.partition(" ")
    if word not in VERDICTS:
        raise Unsupported(f"no verdict {text}")
    body = attribute(VERDICT_CODE, socket.htonl(VERDICTS[word] & 0xFFFF_FFFF).to_bytes(4, sys.byteorder))
    return body + (attribute(VERDICT_CHAIN, _text(chain)) if chain else b"")


def _text(value: str) -> bytes:
    return value.encode() + b"\0"
