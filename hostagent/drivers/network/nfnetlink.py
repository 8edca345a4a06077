"""A few netlink questions about nf_tables that are cheaper without nft: the generation, whether a table is there.

The one rule: answers come from the kernel within microseconds, so calls block. Sources: Linux,
include/uapi/linux/netfilter/nf_tables.h and nfnetlink.h.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

NETLINK_NETFILTER = 12
NFNL_SUBSYS_NFTABLES = 10
MSG_GETTABLE = 1
MSG_GETGEN = 16
NLM_F_REQUEST = 1
NLM_F_ACK = 4
NLMSG_ERROR = 2
ATTRIBUTE_MASK = 0x3FFF
FAMILIES = {"inet": 1, "ip": 2, "arp": 3, "netdev": 5, "ip6": 10}

_HEADER = struct.Struct("=IHHII")
_GENERIC = struct.Struct("=BBH")
_ATTRIBUTE = struct.Struct("=HH")


def message(kind: int, flags: int, sequence: int, family: int, body: bytes = b"", *, resource: int = 0) -> bytes:
    length = _HEADER.size + _GENERIC.size + len(body)
    return _HEADER.pack(length, kind, flags, sequence, 0) + _GENERIC.pack(family, 0, socket.htons(resource)) + body


def attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + b"\0" * (-len(value) % 4)


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
