"""Asking a link whether anybody has an address, by ARP probe or neighbour solicitation: kernels answer.

The one rule: a question is not a claim: the probe has no sender's address, so nobody learns a wrong neighbour by it.
Sources: RFC 5227, section 2.1.1; RFC 4861, sections 4.3 and 7.2.2.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct

from hostagent.drivers.network.rival import ETHERTYPE_ARP, advertised_claim, arp_claim
from hostagent.protocol.errors import AgentError

TRIES = 3
ANSWER_SECONDS = 0.1
ARP_REQUEST = 1
BROADCAST = b"\xff" * 6
SIOCGIFHWADDR = 0x8927
NEIGHBOUR_SOLICITATION = 135
SOURCE_LINK_ADDRESS = 1
_ETHERNET_BYTES = 14
_PACKET_BYTES = 2048


async def is_answered(interface: str, address: str) -> bool:
    """Tries three times, a tenth of a second each. Raises AgentError `address.not_asked`."""
    ask = _ask_ipv6 if ":" in address else _ask_ipv4
    try:
        with _wire(interface, is_ipv6=":" in address) as wire:
            for _ in range(TRIES):
                ask(wire, interface, address)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await _heard(wire, address, own=mac_of(interface))
                        return True
    except (OSError, ValueError) as error:
        raise AgentError("address.not_asked", f"{address} on {interface}: {error}") from error
    return False


def mac_of(interface: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        return fcntl.ioctl(asked, SIOCGIFHWADDR, struct.pack("256s", interface.encode()))[18:24]


def _wire(interface: str, *, is_ipv6: bool) -> socket.socket:
    if is_ipv6:
        wire = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        wire.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
    else:
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETHERTYPE_ARP))
        wire.bind((interface, ETHERTYPE_ARP))
    wire.setblocking(False)
    return wire


async def _heard(wire: socket.socket, address: str, *, own: bytes) -> None:
    """Returns when somebody else says to have it."""
    is_ipv6 = wire.family == socket.AF_INET6
    while True:
        packet = await asyncio.get_running_loop().sock_recv(wire, _PACKET_BYTES)
        claim = advertised_claim(packet) if is_ipv6 else arp_claim(packet[_ETHERNET_BYTES:])
        if claim is not None and claim[0] == address and claim[1] != own:
            return


def _ask_ipv4(wire: socket.socket, interface: str, address: str) -> None:
    mac = mac_of(interface)
    head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, ARP_REQUEST)
    body = head + mac + bytes(4) + bytes(6) + socket.inet_aton(address)
    wire.send(BROADCAST + mac + struct.pack("!H", ETHERTYPE_ARP) + body)


def _ask_ipv6(wire: socket.socket, interface: str, address: str) -> None:
    packed, index = socket.inet_pton(socket.AF_INET6, address), socket.if_nametoindex(interface)
    group = socket.inet_ntop(socket.AF_INET6, bytes.fromhex("ff0200000000000000000001ff") + packed[-3:])
    head = struct.pack("!BBHI", NEIGHBOUR_SOLICITATION, 0, 0, 0)
    body = head + packed + struct.pack("!BB", SOURCE_LINK_ADDRESS, 1) + mac_of(interface)
    wire.sendto(body, (group, 0, 0, index))  # the kernel fills in the checksum
