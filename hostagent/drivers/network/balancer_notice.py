"""What hosts tell each other of ended machines: one datagram each 100 ms and at once when a machine ends. Pure.

The one rule: a datagram says the whole truth of its sender (which of its machines are down), so a lost one is made good by the
next. It is signed with the key of the two hosts and carries both sessions and a counter: a session is an agent's life, so what
was recorded in another life, or before, is not listened to. A datagram for an unknown session only introduces its sender.
Machines that are being stopped stand in the same list with LEAVING before their name: who does not know of that passes them by.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import time
from dataclasses import dataclass, field

MAGIC = b"bpn1"
MAC_BYTES = 32
MAX_BYTES = 60_000
BYE = 1
LEAVING = b"~"
_HEAD = struct.Struct(">4s16s16sQBBH")
NOBODY = bytes(16)


def new_session() -> bytes:
    """Grows with time, so that an older life of the same host is told apart from a newer one."""
    return struct.pack(">Q", time.time_ns()) + os.urandom(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """`to_session` NOBODY: the sender does not know us yet. `down`, `leaving`: nic ids. `is_bye`: it will be silent now."""

    sender: str
    session: bytes
    to_session: bytes
    counter: int
    down: frozenset[str] = frozenset()
    leaving: frozenset[str] = frozenset()
    is_bye: bool = False


def encode(notice: Notice, receiver: str, key: bytes) -> bytes:
    sender = notice.sender.encode()
    names = sorted([*(name.encode() for name in notice.down), *(LEAVING + name.encode() for name in notice.leaving)])
    head = _HEAD.pack(MAGIC, notice.session, notice.to_session, notice.counter, BYE * notice.is_bye, len(sender), len(names))
    body = head + sender + b"".join(bytes((len(name),)) + name for name in names)
    return body + _sign(body, receiver, key)


def sender_of(datagram: bytes) -> str:
    """Who claims to have sent it; raises ValueError for what is no notice."""
    if not _HEAD.size + MAC_BYTES <= len(datagram) <= MAX_BYTES or datagram[:4] != MAGIC:
        raise ValueError("not a notice")
    length = _HEAD.unpack_from(datagram)[5]
    return datagram[_HEAD.size : _HEAD.size + length].decode()


def decode(datagram: bytes, receiver: str, key: bytes) -> Notice:
    """Raises ValueError when it is not signed with this key for this receiver, or is malformed."""
    body, signature = datagram[:-MAC_BYTES], datagram[-MAC_BYTES:]
    if not hmac.compare_digest(signature, _sign(body, receiver, key)):
        raise ValueError("a wrong signature")
    _, session, to_session, counter, flags, length, count = _HEAD.unpack_from(body)
    at, names = _HEAD.size + length, set[bytes]()
    for _ in range(count):
        end = at + 1 + body[at]
        names.add(body[at + 1 : end])
        at = end
    if at != len(body):
        raise ValueError("a wrong length")
    return Notice(
        sender=body[_HEAD.size : _HEAD.size + length].decode(),
        session=session,
        to_session=to_session,
        counter=counter,
        down=frozenset(name.decode() for name in names if not name.startswith(LEAVING)),
        leaving=frozenset(name.removeprefix(LEAVING).decode() for name in names if name.startswith(LEAVING)),
        is_bye=bool(flags & BYE),
    )


def _sign(body: bytes, receiver: str, key: bytes) -> bytes:
    return hmac.new(key, receiver.encode() + b"\0" + body, hashlib.sha256).digest()


@dataclass(slots=True, kw_only=True)
class Listening:
    """What is known of one sender. `heard_at` None: nothing is expected of it."""

    session: bytes = NOBODY
    counter: int = 0
    heard_at: float | None = None
    down: frozenset[str] = field(default_factory=frozenset)
    leaving: frozenset[str] = field(default_factory=frozenset)

    def believes(self, notice: Notice, mine: bytes) -> bool:
        """Whether it is news from the sender's present life to ours; remembers that it came."""
        if notice.session < self.session or (notice.session == self.session and notice.counter <= self.counter):
            return False
        self.session, self.counter = notice.session, notice.counter
        return notice.to_session == mine
