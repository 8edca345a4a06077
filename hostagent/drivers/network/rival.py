"""Hearing that another host says to have an address that is held here: its ARP packets and neighbour advertisements.

The one rule: only hearing happens here; who goes on holding the address is not decided by who speaks louder.
Sources: RFC 5227, section 2.4; RFC 4861, section 4.4; packet(7), icmp6(7).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

ETHERTYPE_ARP = 0x0806
NEIGHBOUR_ADVERTISEMENT = 136
TARGET_LINK_ADDRESS = 2
ICMP6_FILTER = 1
_ARP_BYTES = 28
_ADVERTISEMENT_BYTES = 24
_PACKET_BYTES = 2048


@dataclass(slots=True)
class Wire:
    """What is heard on one interface: two sockets, and the addresses that are held there."""

    mac: bytes
    sockets: list[socket.socket]
    addresses: set[str] = field(default_factory=set)


class RivalWatch:
    """`on_rival` is called with the address whenever somebody else claims one that is guarded."""

    def __init__(self) -> None:
        self.on_rival: Callable[[str], None] = lambda _address: None
        self._wires: dict[str, Wire] = {}

    def guard(self, interface: str, mac: bytes, address: str) -> None:
        """From now on; twice is once. Raises OSError."""
        wire = self._wires.get(interface)
        if wire is not None and wire.mac != mac:  # another interface of the same name
            self._close(interface)
            wire = None
        if wire is None:
            wire = self._wires[interface] = _opened(interface, mac)
            loop = asyncio.get_running_loop()
            for heard, claim in zip(wire.sockets, (arp_claim, advertised_claim), strict=True):
                loop.add_reader(heard, self._hear, interface, heard, claim)
        wire.addresses.add(address)

    def release(self, address: str) -> None:
        for interface, wire in list(self._wires.items()):
            wire.addresses.discard(address)
            if not wire.addresses:
                self._close(interface)

    def close(self) -> None:
        for interface in list(self._wires):
            self._close(interface)

    def _hear(self, interface: str, heard: socket.socket, claim: Callable[[bytes], tuple[str, bytes] | None]) -> None:
        wire = self._wires[interface]
        try:
            found = claim(heard.recv(_PACKET_BYTES))
        except OSError:  # the interface went away
            return self._close(interface)
        if found is not None and found[0] in wire.addresses and found[1] != wire.mac:
            self.on_rival(found[0])
        return None

    def _close(self, interface: str) -> None:
        for heard in self._wires.pop(interface).sockets:
            asyncio.get_running_loop().remove_reader(heard)
            heard.close()


def arp_claim(packet: bytes) -> tuple[str, bytes] | None:
    """The sender's address and MAC: whoever sends from an address says that it has it."""
    if len(packet) < _ARP_BYTES or packet[:6] != b"\x00\x01\x08\x00\x06\x04":
        return None
    return socket.inet_ntoa(packet[14:18]), packet[8:14]


def advertised_claim(packet: bytes) -> tuple[str, bytes] | None:
    """The target of a neighbour advertisement and the MAC in its option; None for anything else."""
    if len(packet) < _ADVERTISEMENT_BYTES or packet[0] != NEIGHBOUR_ADVERTISEMENT:
        return None
    options = packet[_ADVERTISEMENT_BYTES:]
    while len(options) >= 8 and options[1]:
        if options[0] == TARGET_LINK_ADDRESS:
            return socket.inet_ntop(socket.AF_INET6, packet[8:24]), options[2:8]
        options = options[options[1] * 8 :]
    return None


def _opened(interface: str, mac: bytes) -> Wire:
    with contextlib.ExitStack() as stack:
        arp = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETHERTYPE_ARP)))
        arp.bind((interface, ETHERTYPE_ARP))
        advertised = stack.enter_context(socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6))
        blocked = bytearray(b"\xff" * 32)  # a set bit blocks the type, in words of the machine's own order
        word = NEIGHBOUR_ADVERTISEMENT // 32
        struct.pack_into("=I", blocked, word * 4, 0xFFFF_FFFF & ~(1 << NEIGHBOUR_ADVERTISEMENT % 32))
        advertised.setsockopt(socket.IPPROTO_ICMPV6, ICMP6_FILTER, bytes(blocked))
        advertised.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        for one in (arp, advertised):
            one.setblocking(False)
        stack.pop_all()
    return Wire(mac, [arp, advertised])
