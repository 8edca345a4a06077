"""Holding an address and telling the neighbours: gratuitous ARP and unsolicited neighbour advertisements.

The one rule: the address is on the interface before anybody is told, and is told several times, since a frame may be lost.
Sources: RFC 5227, section 3; RFC 4861, sections 4.4 and 7.2.6.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
import struct

from hostagent.drivers.network import asking
from hostagent.drivers.network.asking import ARP_REQUEST, BROADCAST, mac_of
from hostagent.drivers.network.netlink import opened
from hostagent.drivers.network.reach import (
    AddressTraits,
)
from hostagent.drivers.network.rival import ETHERTYPE_ARP, TARGET_LINK_ADDRESS, RivalWatch
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError

logger = logging.getLogger(__name__)
PAUSES_SECONDS = (0.05, 0.2, 0.75, 2.0, 5.0)
LOOPBACK = "lo"
ARP_REPLY = 2
NEIGHBOUR_ADVERTISEMENT = 136
OVERRIDE = 0x2000_0000
ALL_NODES = "ff02::1"


class Announcer:
    """`interface`: where neighbours are told; "" finds the one that leads to the address."""

    traits = AddressTraits(name="announce")

    def __init__(self, interface: str = "") -> None:
        self._interface = interface
        self._repeats: dict[str, asyncio.Task[None]] = {}
        self.rivals = RivalWatch()

    async def held_on(self, address: str) -> str:
        async with opened() as netlink:
            for link in await netlink.links():
                if f"{address}/{_length(address)}" in await netlink.addresses(link.index):
                    return link.name
        return ""

    async def apply(self, address: str, *, is_announced: bool) -> str:
        held = await self.held_on(address)
        name = held or (self._interface or await _interface_towards(address) if is_announced else LOOPBACK)
        if not held:
            attributes = (("name", name), ("address", f"{address}/{_length(address)}"), ("passive", 1))
            async with opened() as netlink:
                await netlink.carry_out((("address_add", attributes),))
        if is_announced and name != LOOPBACK:
            await self.guard(address)
            tell(name, address)
            self._stop(address)
            self._repeats[address] = asyncio.create_task(_repeat(name, address))
        return name

    async def guard(self, address: str) -> None:
        """Hear of others that say to have it, from now on; nothing where it is not held. Twice is once."""
        name = await self.held_on(address)
        if name and name != LOOPBACK:
            self.rivals.guard(name, mac_of(name), address)

    async def is_answered(self, address: str) -> bool:
        return await asking.is_answered(self._interface or await _interface_towards(address), address)

    async def defend(self, address: str) -> None:
        if name := await self.held_on(address):
            tell(name, address)

    async def remove(self, address: str) -> None:
        self._stop(address)
        self.rivals.release(address)
        if name := await self.held_on(address):
            async with opened() as netlink:
                await netlink.carry_out((("address_remove", (("name", name), ("address", f"{address}/{_length(address)}"))),))

    def _stop(self, address: str) -> None:
        if (repeat := self._repeats.pop(address, None)) is not None:
            repeat.cancel()


def tell(interface: str, address: str) -> None:
    """Once, to everybody on the link. Raises AgentError `address.not_announced`."""
    try:
        mac = mac_of(interface)
        if ":" in address:
            _tell_ipv6(interface, address, mac)
        else:
            _tell_ipv4(interface, address, mac)
    except (OSError, ValueError) as error:
        raise AgentError("address.not_announced", f"{address} on {interface}: {error}") from error


async def _repeat(interface: str, address: str) -> None:
    for pause in PAUSES_SECONDS:
        await asyncio.sleep(pause)
        try:
            tell(interface, address)
        except AgentError as error:
            logger.warning("%s", error)


def _tell_ipv4(interface: str, address: str, mac: bytes) -> None:
    packed = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
        wire.bind((interface, 0))
        for operation in (ARP_REQUEST, ARP_REPLY):  # some listen to the one, some to the other
            head = struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation)
            target = BROADCAST if operation == ARP_REPLY else bytes(6)
            body = head + mac + packed + target + packed
            wire.send(BROADCAST + mac + struct.pack("!H", ETHERTYPE_ARP) + body)


def _tell_ipv6(interface: str, address: str, mac: bytes) -> None:
    packed = socket.inet_pton(socket.AF_INET6, address)
    body = (
        struct.pack("!BBHI", NEIGHBOUR_ADVERTISEMENT, 0, 0, OVERRIDE)
        + packed
        + struct.pack("!BB", TARGET_LINK_ADDRESS, 1)
        + mac
    )
    with socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6) as wire:
        index = socket.if_nametoindex(interface)
        wire.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        wire.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
        with contextlib.suppress(OSError):  # not ours yet: the kernel then takes the link-local one
            wire.bind((address, 0))
        wire.sendto(body, (ALL_NODES, 0, 0, index))  # the kernel fills in the checksum


async def _interface_towards(address: str) -> str:
    """By the kernel's own choice of a way: a link that has the address's network, else the default route's."""
    finished = await run("ip", "-j", "route", "get", address, check=False)
    found = json.loads(finished.stdout or b"[]")
    if not found or "dev" not in found[0]:
        raise AgentError("address.no_interface", f"no interface leads to {address}: name one in host.toml, public_interface")
    return str(found[0]["dev"])


def _length(address: str) -> int:
    return ipaddress.ip_address(address).max_prefixlen
