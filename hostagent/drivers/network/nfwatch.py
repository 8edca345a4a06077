"""Who else changes our tables: the kernel's own notices of rule changes.

The one rule: nobody listens while we write. Notices cost the kernel 20 µs an element, so the group is left before a transaction
of ours and joined after it; what somebody else did in between shows in the generation, which then rose by more than one. So
every notice that does arrive is of somebody else's change. Source: Linux, net/netfilter/nf_tables_api.c.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator

from hostagent.drivers.network.nfnetlink import NETLINK_NETFILTER, NFNL_SUBSYS_NFTABLES, SO_RCVBUFFORCE, attributes, messages

GROUP_NFTABLES = 7
MSG_NEWGEN = 15
GEN_PROC_NAME = 3
SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, NETLINK_DROP_MEMBERSHIP = 270, 1, 2
QUEUE_BYTES = 4 << 20
_GENERIC_SIZE = 4


class Watch:
    """Notices of the network namespace of the thread that makes this. Raises OSError."""

    def __init__(self, table: str, generation: Callable[[], int]) -> None:
        self._name = table.encode()
        self._generation = generation
        self._is_doubtful = False
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
        self._socket.bind((0, 0))
        with contextlib.suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, QUEUE_BYTES)
        self._socket.setblocking(False)
        self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, GROUP_NFTABLES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around one transaction of ours, or none when it is refused."""
        self._socket.setsockopt(SOL_NETLINK, NETLINK_DROP_MEMBERSHIP, GROUP_NFTABLES)
        before = self._generation()
        try:
            yield
        finally:
            self._socket.setsockopt(SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, GROUP_NFTABLES)
            self._is_doubtful |= self._generation() > before + 1

    def foreign(self) -> str | None:
        """The name of a program that changed our tables since the last call ("" when unknown), None when nobody did."""
        was_doubtful, self._is_doubtful = self._is_doubtful, False
        touched: set[int] = set()
        names: dict[int, str] = {}
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:  # there were more notices than room for them
                if error.errno != errno.ENOBUFS:
                    raise
                was_doubtful = True
                continue
            self._read(data, touched, names)
        if touched:
            return next((names[number] for number in touched if number in names), "")
        return "" if was_doubtful else None

    def _read(self, data: bytes, touched: set[int], names: dict[int, str]) -> None:
        """Low bits of the generations that touched our tables, and who made each generation."""
        for kind, _, _, payload in messages(data):
            number = int.from_bytes(payload[2:4], "big")
            if kind >> 8 != NFNL_SUBSYS_NFTABLES:
                continue
            found = attributes(payload[_GENERIC_SIZE:])
            if kind & 0xFF == MSG_NEWGEN:
                names[number] = found.get(GEN_PROC_NAME, b"").rstrip(b"\0").decode(errors="replace")
            elif found.get(1, b"").rstrip(b"\0") == self._name:
                touched.add(number)
