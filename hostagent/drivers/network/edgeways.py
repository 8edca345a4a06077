"""Ways between edges and hosts of backends: VXLANs inside the hosts' tunnels, with tables of routes of their own.

The one rule: which edge a flow came by is its mark, and what it answers goes by that mark's table, back to that edge. A number
that stands for an edge in marks is on disk before a packet carries it, and is given to another only when nobody wants it.
A tunnel itself cannot do this: by WireGuard's allowed addresses a peer speaks only as its own machines, never as a client.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import socket
from pathlib import Path

from hostagent.drivers.network.links import ensure_forwarding, way_sysctls
from hostagent.drivers.network.netlink import Attributes, Netlink, Request, opened, set_sysctl
from hostagent.drivers.network.reach import WaysMade, WayTraits
from hostagent.drivers.network.table import MARK_EDGE_MASK, MARK_EDGE_SHIFT, MARK_OWN_WAY
from hostagent.lib import files
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import EdgeWaysWanted

PORT = 51830
PROTOCOL = 193  # routing protocol number of what is ours; free in iproute2's rt_protos
PRIORITY = 5190  # of our rules: before the main table
FIRST_TABLE = 51_900
FAMILIES = (socket.AF_INET, socket.AF_INET6)


class EdgeWays:
    """`memory`: where the numbers of edges are remembered."""

    traits = WayTraits(name="vxlan")

    def __init__(self, machine_id: str, memory: Path) -> None:
        self._digits = hashlib.sha256(machine_id.encode()).hexdigest()[:6]
        self._memory = memory

    def plan(self, wanted: EdgeWaysWanted) -> WaysMade:
        edges = [way.host_id for way in wanted.inward]
        numbers = self._numbers(edges)
        return WaysMade(
            outward=f"bxe{self._digits}" if wanted.outward else "",
            inward={edge: f"bx{numbers[edge]:03}{self._digits}" for edge in edges},
            numbers=numbers,
        )

    async def differences(self, wanted: EdgeWaysWanted) -> tuple[str, ...] | None:
        made = self.plan(wanted)
        async with opened() as netlink:
            present = await self._present(netlink)
            if not present and not made.outward and not made.inward:
                return None
            found = [f"{name} is not wanted" for name in sorted(present - {made.outward, *made.inward.values()})]
            for name, requests in self._devices(wanted, made).items():
                found += [f"{name}: {verb}" for verb, _ in await _missing(netlink, name, requests)]
            asked = _rules(made)
            found += ["rules"] if await self._own_marks(netlink) != asked else []
        return tuple(found)

    async def apply(self, wanted: EdgeWaysWanted) -> None:
        ensure_forwarding()
        made = self.plan(wanted)
        async with opened() as netlink:
            for name in await self._present(netlink) - {made.outward, *made.inward.values()}:
                await netlink.remove_link(name)
            for name, requests in self._devices(wanted, made).items():
                await self._make(netlink, name, requests)
            present, asked = await self._own_marks(netlink), _rules(made)
            await netlink.carry_out(tuple(_rule("rule_add", one) for one in sorted(asked - present)))
            await netlink.carry_out(tuple(_rule("rule_remove", one) for one in sorted(present - asked)))
        self._keep(made.numbers)

    async def remove(self) -> None:
        async with opened() as netlink:
            for name in await self._present(netlink):
                await netlink.remove_link(name)
            gone = await self._own_marks(netlink)
            await netlink.carry_out(tuple(_rule("rule_remove", one) for one in sorted(gone)))
        files.remove(self._memory)

    async def _present(self, netlink: Netlink) -> set[str]:
        """Our interfaces; those of other agents in the same network namespace end in other digits."""
        names = (link.name for link in await netlink.links())
        return {name for name in names if name.startswith("bx") and name.endswith(self._digits)}

    async def _own_marks(self, netlink: Netlink) -> set[tuple[int, int, int]]:
        """Rules of ours: by number, of an edge that we know or knew."""
        tables = {FIRST_TABLE + number for number in (*self._remembered().values(), MARK_OWN_WAY)}
        return {one for one in await netlink.marks(PROTOCOL) if one[2] in tables}

    def _devices(self, wanted: EdgeWaysWanted, made: WaysMade) -> dict[str, tuple[Request, ...]]:
        found: dict[str, tuple[Request, ...]] = {}
        for way in wanted.inward:
            name, number = made.inward[way.host_id], made.numbers[way.host_id]
            requests = _device(name, way.network, wanted)
            found[name] = (*requests, *_to(name, way.address, number, ("0.0.0.0/0", "::/0")))
        if made.outward:
            requests = _device(made.outward, wanted.network, wanted)
            for out in wanted.outward:
                requests += _to(made.outward, out.address, MARK_OWN_WAY, out.destinations)
            found[made.outward] = requests
        return found

    @staticmethod
    async def _make(netlink: Netlink, name: str, requests: tuple[Request, ...]) -> None:
        """One of another number or at another address is made anew: everything on it goes with it."""
        vxlan, asked = await netlink.vxlan(name), dict(requests[0][1])
        if vxlan is None or vxlan != (asked["network"], asked["local"]):
            await netlink.remove_link(name)
            await netlink.carry_out(requests[:1])
        for key, value in way_sysctls(name):
            set_sysctl(key, value)
        await netlink.carry_out(await _missing(netlink, name, requests))
        await netlink.carry_out(await _stale(netlink, name, requests))

    def _numbers(self, edges: list[str]) -> dict[str, int]:
        known = self._remembered()
        found = {edge: known[edge] for edge in edges if edge in known}
        free = iter(sorted(set(range(1, MARK_OWN_WAY)) - set(known.values())))
        for edge in sorted(set(edges) - found.keys()):
            number = next(free, 0)
            if not number:
                raise AgentError("edgeways.exhausted", f"this host knows {MARK_OWN_WAY - 1} edges already", retryable=False)
            found[edge] = number
        if found.keys() - known.keys():
            self._keep(known | found)
        return found

    def _remembered(self) -> dict[str, int]:
        try:
            return {str(edge): int(number) for edge, number in json.loads(self._memory.read_bytes()).items()}
        except (OSError, ValueError, AttributeError):
            return {}

    def _keep(self, numbers: dict[str, int]) -> None:
        if numbers != self._remembered():
            files.write_atomically(self._memory, json.dumps(numbers).encode())


def mac_of(address: str) -> str:
    """Of the host with this address of its own: nobody has to tell it."""
    return ":".join(("02", "bd", *(f"{byte:02x}" for byte in ipaddress.IPv4Address(address).packed)))


def gateways_of(address: str) -> tuple[str, str]:
    """Next hops of both families that stand for a host on our interfaces, and nowhere else."""
    digits = ipaddress.IPv4Address(address).packed.hex()
    return address, str(ipaddress.IPv6Address(f"fe80::bd:{digits[:4]}:{digits[4:]}"))


def mark_of(number: int) -> int:
    return number << MARK_EDGE_SHIFT


def _device(name: str, network: int, wanted: EdgeWaysWanted) -> tuple[Request, ...]:
    about: Attributes = (("name", name), ("network", network), ("local", wanted.address), ("port", PORT))
    made: Attributes = (*about, ("mac", mac_of(wanted.address)), ("alias", "bedplate edge way"))
    return (
        ("vxlan_add", made),
        ("link_up", (("name", name), ("mtu", wanted.mtu_bytes), ("alias", "bedplate edge way"))),
        ("address_add", (("name", name), ("address", f"{wanted.address}/32"))),  # without one no reverse path is right
    )


def _to(name: str, far_end: str, number: int, destinations: tuple[str, ...]) -> tuple[Request, ...]:
    """What leads to a host: where its MAC is, its next hops, and routes by them."""
    mac, hops = mac_of(far_end), gateways_of(far_end)
    requests: list[Request] = [("forward_set", (("name", name), ("mac", mac), ("far_end", far_end)))]
    requests += [("neighbour_set", (("name", name), ("address", hop), ("mac", mac))) for hop in hops]
    for destination in destinations:
        about: Attributes = (("destination", destination), ("gateway", hops[":" in destination]), ("interface", name))
        more: Attributes = (("protocol", PROTOCOL), ("table", FIRST_TABLE + number), ("onlink", 1))
        requests.append(("route_replace", (*about, *more)))
    return tuple(requests)


async def _missing(netlink: Netlink, name: str, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    """Those whose effect is not there."""
    link, vxlan = await netlink.link(name), await netlink.vxlan(name)
    asked = dict(requests[0][1])
    if link is None or vxlan is None or vxlan != (asked["network"], asked["local"]):
        return requests if link is None else requests[1:]
    forwards, neighbours = await netlink.forwards(link.index), await netlink.permanent_neighbours(link.index)
    addresses, routes = await netlink.addresses(link.index), await _routes(netlink, link.index, requests)

    def is_there(verb: str, a: dict[str, str | int]) -> bool:
        match verb:
            case "vxlan_add":
                return True
            case "link_up":
                return link.is_up and link.mtu_bytes == a["mtu"]
            case "address_add":
                return a["address"] in addresses
            case "forward_set":
                return (a["mac"], a["far_end"]) in forwards
            case "neighbour_set":
                return (a["address"], a["mac"]) in neighbours
            case _:
                return (_prefix(str(a["destination"])), a["gateway"]) in routes

    return tuple(request for request in requests if not is_there(request[0], dict(request[1])))


async def _stale(netlink: Netlink, name: str, requests: tuple[Request, ...]) -> tuple[Request, ...]:
    link = await netlink.link(name)
    assert link is not None
    asked = {_prefix(str(dict(a)["destination"])) for verb, a in requests if verb == "route_replace"}
    found: list[Request] = []
    for table in _tables(requests):
        for destination, _ in sorted(await _routes(netlink, link.index, requests)):
            if destination not in asked:
                about: Attributes = (("destination", destination), ("interface", name), ("protocol", PROTOCOL))
                found.append(("route_remove", (*about, ("table", table))))
    return tuple(found)


async def _routes(netlink: Netlink, index: int, requests: tuple[Request, ...]) -> set[tuple[str, str]]:
    found = [route for table in _tables(requests) for route in await netlink.routes(PROTOCOL, table)]
    return {(route.destination, route.gateway) for route in found if route.index == index}


def _tables(requests: tuple[Request, ...]) -> set[int]:
    return {int(dict(a)["table"]) for verb, a in requests if verb == "route_replace"}


def _prefix(destination: str) -> str:
    return destination if "/" in destination else f"{destination}/{128 if ':' in destination else 32}"


def _rules(made: WaysMade) -> set[tuple[int, int, int]]:
    numbers = (*made.numbers.values(), *((MARK_OWN_WAY,) if made.outward else ()))
    return {(int(family), mark_of(number), FIRST_TABLE + number) for family in FAMILIES for number in numbers}


def _rule(verb: str, about: tuple[int, int, int]) -> Request:
    family, mark, table = about
    attributes: Attributes = (("family", family), ("mark", mark), ("mask", MARK_EDGE_MASK), ("table", table))
    return (verb, (*attributes, ("priority", PRIORITY), ("protocol", PROTOCOL)))
