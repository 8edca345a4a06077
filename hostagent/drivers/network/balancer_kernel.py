"""What a balancer reads of the kernel besides rules: the counters of marks, and how many flows have them.

The one rule: nothing here goes through the rules' helper, so that reading a thousand services' counters never delays a swap.
Source: Linux, include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hostagent.drivers.network.balancer_rules import OFFLOADED
from hostagent.drivers.network.conntrack import (
    CTA_COUNTERS_ORIG,
    CTA_COUNTERS_REPLY,
    CTA_ID,
    CTA_MARK,
    CTA_MARK_MASK,
    CTA_STATUS,
    MSG_GET,
    NFNL_SUBSYS_CTNETLINK,
)
from hostagent.drivers.network.nfnetlink import (
    FAMILIES,
    NETLINK_NETFILTER,
    NFNL_SUBSYS_NFTABLES,
    attribute,
    attributes,
    message,
    messages,
)
from hostagent.drivers.network.table import TABLE

_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_DONE, _ERROR = 3, 2
_GET_SET_ELEMENTS = 13
_LIST_TABLE, _LIST_SET, _LIST_ELEMENTS = 1, 2, 3
_ELEMENT_KEY, _ELEMENT_EXPRESSION, _ELEMENT_EXPRESSIONS = 1, 7, 11
_GENERIC_BYTES = 4
COUNT = Path("/proc/sys/net/netfilter/nf_conntrack_count")
MAX_WALKED_FLOWS = 50_000
IN_FLOWTABLE = 1 << 14 | 1 << 15  # IPS_OFFLOAD, IPS_HW_OFFLOAD
_RECEIVE_BYTES = 1 << 18


def counters(name: str) -> dict[int, tuple[int, int]]:
    """(packets, bytes) by mark of one counting set; empty when the set is not there. Blocks; not for the event loop."""
    body = attribute(_LIST_TABLE, TABLE.encode() + b"\0") + attribute(_LIST_SET, name.encode() + b"\0")
    kind = NFNL_SUBSYS_NFTABLES << 8 | _GET_SET_ELEMENTS
    found: dict[int, tuple[int, int]] = {}
    for payload in _ask(message(kind, _REQUEST | _DUMP, 1, FAMILIES["inet"], body)):
        for element in _nested(attributes(payload[_GENERIC_BYTES:]).get(_LIST_ELEMENTS, b"")):
            fields = attributes(element)
            mark = int.from_bytes(attributes(fields[_ELEMENT_KEY])[1], "little")
            expression = fields.get(_ELEMENT_EXPRESSION) or next(_nested(fields.get(_ELEMENT_EXPRESSIONS, b"")), b"")
            counter = attributes(attributes(expression).get(2, b""))
            found[mark] = (int.from_bytes(counter.get(2, b""), "big"), int.from_bytes(counter.get(1, b""), "big"))
    return found


@dataclass(frozen=True, slots=True)
class Carried:
    """Packets and bytes by direction: `in` towards the backend."""

    in_packets: int = 0
    in_bytes: int = 0
    out_packets: int = 0
    out_bytes: int = 0


def marked_flows(bit: int) -> Iterator[tuple[bytes, int, Carried]]:
    """(id, mark, what it has carried) of every flow with this bit in its mark; found by the kernel. Blocks."""
    wanted = attribute(CTA_MARK, bit.to_bytes(4, "big")) + attribute(CTA_MARK_MASK, bit.to_bytes(4, "big"))
    for payload in _ask(message(NFNL_SUBSYS_CTNETLINK << 8 | MSG_GET, _REQUEST | _DUMP, 1, socket.AF_UNSPEC, wanted)):
        fields = attributes(payload[_GENERIC_BYTES:])
        counted = [attributes(fields.get(kind, b"")) for kind in (CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY)]
        numbers = (int.from_bytes(one.get(kind, b""), "big") for one in counted for kind in (1, 2))
        yield fields.get(CTA_ID, b""), int.from_bytes(fields.get(CTA_MARK, b""), "big"), Carried(*numbers)


def live_flows() -> tuple[Counter[int] | None, int]:
    """(flows by mark without the flowtable's bit, flows in a flowtable). None: the table is too large to be walked. Blocks."""
    marks: Counter[int] = Counter()
    offloaded = 0
    try:
        if int(COUNT.read_text(encoding="ascii")) > MAX_WALKED_FLOWS:
            return None, 0
    except OSError:
        return None, 0
    for payload in _ask(message(NFNL_SUBSYS_CTNETLINK << 8 | MSG_GET, _REQUEST | _DUMP, 1, socket.AF_UNSPEC)):
        fields = attributes(payload[_GENERIC_BYTES:])
        if mark := int.from_bytes(fields.get(CTA_MARK, b""), "big"):
            marks[mark & ~OFFLOADED] += 1
        if int.from_bytes(fields.get(CTA_STATUS, b""), "big") & IN_FLOWTABLE:
            offloaded += 1
    return marks, offloaded


def _ask(request: bytes) -> Iterator[bytes]:
    """The answers' payloads. A missing table or set is an empty answer; anything else raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER) as channel:
        channel.settimeout(5.0)
        channel.bind((0, 0))
        channel.send(request)
        while True:
            for kind, _, _, payload in messages(channel.recv(_RECEIVE_BYTES)):
                if kind == _DONE:
                    return
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    if number not in (0, 2):
                        raise OSError(number, os.strerror(number))
                    return
                yield payload


def _nested(data: bytes) -> Iterator[bytes]:
    """The values of attributes that all have one number."""
    at = 0
    while at + 4 <= len(data):
        length = struct.unpack_from("=H", data, at)[0]
        if length < 4:
            return
        yield data[at + 4 : at + length]
        at += (length + 3) & ~3
