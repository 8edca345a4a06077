"""What is asked of, and told to, nf_tables by netlink without nft: the generation, whether a table is there, batches.

The one rule: answers come from the kernel within microseconds, so calls block. Sources: Linux,
include/uapi/linux/netfilter/nf_tables.h and nfnetlink.h.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct

NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES = 10
MSG_GETTABLE = 1
MSG_GETGEN = 16
MSG_GETOBJ = 19
OBJECT_COUNTER = 1
NLM_F_DUMP = 0x300
NLMSG_DONE = 3
BATCH_BEGIN, BATCH_END = 16, 17
NLM_F_CREATE = 0x400
NLM_F_APPEND = 0x800
MSG_NEWRULE = 6
SEND_BYTES = 8 << 20
RECEIVE_BYTES = 1 << 20
NLM_F_REQUEST = 1
NLM_F_ACK = 4
NLMSG_ERROR = 2
ATTRIBUTE_MASK = 0x3FFF
NESTED = 0x8000
LIST_ELEM = 1
FAMILIES = {"inet": 1, "ip": 2, "arp": 3, "netdev": 5, "ip6": 10}

SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33

_HEADER = struct.Struct("=IHHII")
_GENERIC = struct.Struct("=BBH")
_ATTRIBUTE = struct.Struct("=HH")


def message(kind: int, flags: int, sequence: int, family: int, body: bytes = b"", *, resource: int = 0) -> bytes:
    length = _HEADER.size + _GENERIC.size + len(body)
    return _HEADER.pack(length, kind, flags, sequence, 0) + _GENERIC.pack(family, 0, socket.htons(resource)) + body


def attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)


def nested(kind: int, *inside: bytes) -> bytes:
    return attribute(kind | NESTED, b"".join(inside))


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def number(value: int) -> bytes:
    """As nf_tables has all of its own 32-bit numbers."""
    return value.to_bytes(4, "big")


def attributes(data: bytes) -> dict[int, bytes]:
    """By their number; the last of several of one number."""
    found: dict[int, bytes] = {}
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind & ATTRIBUTE_MASK] = data[at + _ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    return found


def messages(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(type, sequence, sender's port, payload after the netlink header) of every message in a datagram."""
    found = []
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, _, sequence, port = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            break
        found.append((kind, sequence, port, data[at + _HEADER.size : at + length]))
        at += (length + 3) & ~3
    return found


class NfTables:
    """One socket, in the network namespace of the thread that made it. Raises OSError."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        self._socket.settimeout(5.0)
        for option, size in ((SO_SNDBUFFORCE, SEND_BYTES), (SO_RCVBUFFORCE, RECEIVE_BYTES)):
            with contextlib.suppress(PermissionError):
                self._socket.setsockopt(socket.SOL_SOCKET, option, size)
        self._sequence = int.from_bytes(os.urandom(3), "big")

    def close(self) -> None:
        self._socket.close()

    def generation(self) -> int:
        """How many transactions there were in this network namespace, by whatever program."""
        answer = self._ask(MSG_GETGEN, 0)
        return int.from_bytes(attributes(answer[_GENERIC.size :])[1], "big")

    def has_table(self, family: str, name: str) -> bool:
        try:
            self._ask(MSG_GETTABLE, FAMILIES[family], attribute(1, name.encode() + b"\0"))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def counters(self, family: str, table: str) -> dict[str, int]:
        """Packets by the name of each named counter; empty when there is no such table."""
        body = attribute(1, table.encode() + b"\0") + attribute(3, OBJECT_COUNTER.to_bytes(4, "big"))
        self._sequence += 1
        kind, flags = NFNL_SUBSYS_NFTABLES << 8 | MSG_GETOBJ, NLM_F_REQUEST | NLM_F_DUMP
        self._socket.send(message(kind, flags, self._sequence, FAMILIES[family], body))
        found: dict[str, int] = {}
        while True:
            for kind, sequence, _, payload in messages(self._socket.recv(RECEIVE_BYTES)):
                if sequence == self._sequence and kind in (NLMSG_DONE, NLMSG_ERROR):
                    return found
                parts = attributes(payload[_GENERIC.size :])
                if sequence == self._sequence and 4 in parts:
                    found[parts[2].rstrip(b"\0").decode()] = int.from_bytes(attributes(parts[4]).get(2, b""), "big")

    def batch(self, requests: list[tuple[int, int, bytes]]) -> None:
        """(message type, family, body) in one transaction: all or nothing. Raises OSError with the kernel's first word."""
        begin, end = (message(kind, NLM_F_REQUEST, 0, 0, resource=NFNL_SUBSYS_NFTABLES) for kind in (BATCH_BEGIN, BATCH_END))
        flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK
        appending = flags | NLM_F_APPEND  # without it a rule becomes the first of its chain
        first = self._sequence + 1
        told = []
        for kind, family, body in requests:
            self._sequence += 1
            chosen = appending if kind == MSG_NEWRULE else flags
            told.append(message(NFNL_SUBSYS_NFTABLES << 8 | kind, chosen, self._sequence, family, body))
        self._socket.send(b"".join((begin, *told, end)))
        waiting, failure = set(range(first, self._sequence + 1)), 0
        while waiting:
            for found, sequence, _, payload in messages(self._socket.recv(RECEIVE_BYTES)):
                if found == NLMSG_ERROR:
                    failure = failure or -struct.unpack_from("=i", payload)[0]
                    if sequence == 0:  # the batch as a whole
                        waiting.clear()
                waiting.discard(sequence)
        if failure:
            raise OSError(failure, os.strerror(failure))

    def _ask(self, kind: int, family: int, body: bytes = b"") -> bytes:
        self._sequence += 1
        self._socket.send(message(NFNL_SUBSYS_NFTABLES << 8 | kind, NLM_F_REQUEST, self._sequence, family, body))
        while True:
            for found, sequence, _, payload in messages(self._socket.recv(65_536)):
                if sequence != self._sequence:
                    continue
                if found == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    raise OSError(number, os.strerror(number))
                return payload
