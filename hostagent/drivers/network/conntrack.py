"""The kernel's table of flows: read, and deleted from. Nothing else of the agent deletes flows.

The one rule: the table may hold a million entries, so what is not asked for is passed over unread, off the event loop. Sources:
Linux, include/uapi/linux/netfilter/nfnetlink_conntrack.h and net/netfilter/nf_conntrack_netlink.c.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from hostagent.drivers.network.nfnetlink import (
    NETLINK_NETFILTER,
    NLM_F_ACK,
    NLM_F_REQUEST,
    NLMSG_ERROR,
    attribute,
    attributes,
    message,
    messages,
)
from hostagent.drivers.network.protocol import End, Flow, FlowTraits
from hostagent.protocol.errors import AgentError

NFNL_SUBSYS_CTNETLINK = 1
MSG_GET, MSG_DELETE, MSG_GET_STATS = 1, 2, 5
NLM_F_DUMP = 0x300
NLMSG_DONE = 3
CTA_TUPLE_ORIG, CTA_TUPLE_REPLY, CTA_STATUS, CTA_TIMEOUT, CTA_MARK = 1, 2, 3, 7, 8
CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY, CTA_ID, CTA_MARK_MASK = 9, 10, 12, 21
NESTED = 0x8000
RECEIVE_BYTES = 1 << 20
DEADLINE_SECONDS = 10.0
_GENERIC_SIZE = 4
T = TypeVar("T")


class Conntrack:
    """One network namespace's flows: of the thread that uses this first."""

    traits = FlowTraits(name="conntrack")

    def __init__(self) -> None:
        self._opened: socket.socket | None = None
        self._sequence = int.from_bytes(os.urandom(3), "big")
        self._lock = asyncio.Lock()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    async def count(self) -> int:
        def work() -> int:
            payload = next(self._ask(MSG_GET_STATS, NLM_F_REQUEST, 0, b""))
            return int.from_bytes(attributes(payload[_GENERIC_SIZE:])[1], "big")

        return await self._off_loop(work)

    async def flows(
        self, *, addresses: Collection[str] | None = None, mark: int | None = None, mask: int = 0xFFFF_FFFF
    ) -> list[Flow]:
        """Those with one of these addresses at any end (None: all) and, if given, whose mark is `mark` under `mask`."""
        wanted = None if addresses is None else [ipaddress.ip_address(address).packed for address in addresses]
        body = b"" if mark is None else _mark(mark, mask)

        def work() -> list[Flow]:
            found = []
            for payload in self._ask(MSG_GET, NLM_F_REQUEST | NLM_F_DUMP, 0, body):
                if wanted is None or any(address in payload for address in wanted):
                    flow = _flow(payload)
                    if flow is not None and (addresses is None or _touches(flow, addresses)):
                        found.append(flow)
            return found

        return await self._off_loop(work) if wanted is None or wanted else []

    async def delete(self, flows: Iterable[Flow]) -> int:
        """How many were there; those that ended meanwhile are none."""
        chosen = list(flows)

        def work() -> int:
            return sum(self._delete(flow.family, flow.key) for flow in chosen)

        return await self._off_loop(work) if chosen else 0

    async def delete_marked(self, mark: int, mask: int) -> None:
        """All whose mark is `mark` under `mask`, found and deleted by the kernel."""
        if not mask:
            raise ValueError("a mask of 0 means every flow")
        await self._off_loop(lambda: self._delete(0, _mark(mark, mask)))

    async def _off_loop(self, work: Callable[[], T]) -> T:
        async with self._lock:
            try:
                if self._opened is None:
                    self._opened = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER)
                    self._opened.bind((0, 0))
                    self._opened.settimeout(DEADLINE_SECONDS)
                    self._opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
                return await asyncio.to_thread(work)
            except OSError as error:
                raise AgentError("flows.refused", f"the kernel's table of flows: {error}") from error

    def _delete(self, family: int, body: bytes) -> bool:
        try:
            for _ in self._ask(MSG_DELETE, NLM_F_REQUEST | NLM_F_ACK, family, body):
                pass
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EBUSY):  # gone, or in a flowtable, which ends it in its own time
                return False
            raise
        return True

    def _ask(self, kind: int, flags: int, family: int, body: bytes) -> Iterator[bytes]:
        """Payloads until the answer's end. Raises OSError."""
        assert self._opened is not None
        self._sequence += 1
        self._opened.send(message(NFNL_SUBSYS_CTNETLINK << 8 | kind, flags, self._sequence, family, body))
        while True:
            for found, sequence, _, payload in messages(self._opened.recv(RECEIVE_BYTES)):
                if sequence != self._sequence:
                    continue
                if found == NLMSG_ERROR:
                    number = -struct.unpack_from("=i", payload)[0]
                    if number:
                        raise OSError(number, os.strerror(number))
                    return
                if found == NLMSG_DONE:
                    return
                yield payload
                if not flags & (NLM_F_DUMP | NLM_F_ACK):
                    return


def _mark(mark: int, mask: int) -> bytes:
    return attribute(CTA_MARK, mark.to_bytes(4, "big")) + attribute(CTA_MARK_MASK, mask.to_bytes(4, "big"))


def _flow(payload: bytes) -> Flow | None:
    """None for an entry without addresses or ports that we understand."""
    found = attributes(payload[_GENERIC_SIZE:])
    try:
        protocol, original = _end(found[CTA_TUPLE_ORIG])
        _, reply = _end(found[CTA_TUPLE_REPLY])
    except (KeyError, ValueError):
        return None
    key = attribute(CTA_TUPLE_ORIG | NESTED, found[CTA_TUPLE_ORIG])
    if CTA_ID in found:
        key += attribute(CTA_ID, found[CTA_ID])
    counters = [attributes(found.get(kind, b"")) for kind in (CTA_COUNTERS_ORIG, CTA_COUNTERS_REPLY)]
    return Flow(
        family=payload[0],
        protocol=protocol,
        original=original,
        reply=reply,
        mark=_number(found, CTA_MARK),
        status=_number(found, CTA_STATUS),
        timeout_seconds=_number(found, CTA_TIMEOUT),
        packets=sum(_number(counter, 1) for counter in counters),
        bytes_=sum(_number(counter, 2) for counter in counters),
        key=key,
    )


def _end(data: bytes) -> tuple[int, End]:
    parts = attributes(data)
    addresses, ports = attributes(parts[1]), attributes(parts[2])
    source, destination = (addresses[1], addresses[2]) if 1 in addresses else (addresses[3], addresses[4])
    return ports[1][0], End(
        source=str(ipaddress.ip_address(source)),
        source_port=_number(ports, 2),
        destination=str(ipaddress.ip_address(destination)),
        destination_port=_number(ports, 3),
    )


def _number(found: dict[int, bytes], kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), "big")


def _touches(flow: Flow, addresses: Collection[str]) -> bool:
    ends = (flow.original, flow.reply)
    return any(end.source in addresses or end.destination in addresses for end in ends)
