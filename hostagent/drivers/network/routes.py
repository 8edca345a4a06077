"""Routes to machines on other hosts: over the data network, or into a tunnel's interface.

The one rule: a route changes its way in one step, so no packet finds none; other routes are never touched: ours are known by
their routing protocol number, and among agents in one network namespace by our record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from hostagent.drivers.network.links import ensure_forwarding
from hostagent.drivers.network.netlink import Attributes, Netlink, Request, Route, opened
from hostagent.drivers.network.protocol import LinkRendered, RoutePlan, RoutesObserved, RouteTraits
from hostagent.lib import files
from hostagent.protocol.wanted import RouteWanted

PROTOCOL_ROUTES = 191  # free in iproute2's rt_protos
METRIC_ROUTES = 4096  # over a link's own route, so a machine that is here is never sent elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One route, ours or wanted; `interface` "" lets the kernel choose."""

    destination: str
    gateway: str = ""
    interface: str = ""
    is_unreachable: bool = False

    def request(self, verb: str) -> Request:
        attributes: Attributes = (("destination", self.destination), ("gateway", self.gateway), ("interface", self.interface))
        if self.is_unreachable:
            attributes = (("destination", self.destination), ("unreachable", 1))
        return (verb, (*attributes, ("protocol", PROTOCOL_ROUTES), ("metric", METRIC_ROUTES)))


class RouteRecord:
    """Destinations of the routes that one agent has made, on disk before they are made: another agent's in the same network
    namespace have the same routing protocol number. Without a `path` all are its own.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> frozenset[str] | None:
        """None = all."""
        if self._path is None:
            return None
        try:
            return frozenset(json.loads(self._path.read_bytes()))
        except (OSError, ValueError):
            return frozenset()

    def write(self, destinations: frozenset[str]) -> None:
        if self._path is not None and destinations != self.read():
            files.write_atomically(self._path, json.dumps(sorted(destinations)).encode())


class RouteSet:
    """`tunnels`: the interface of each slot; `record`: where it is written down which routes are ours."""

    traits = RouteTraits(name="routes")

    def __init__(self, tunnels: Mapping[str, str] | None = None, record: Path | None = None) -> None:
        self._tunnels = dict(tunnels or {})
        self._record = RouteRecord(record)

    def render(self, plan: RoutePlan) -> LinkRendered:
        return LinkRendered(requests=tuple(way.request("route_add") for way in self._wanted(plan)))

    async def observe(self) -> RoutesObserved | None:
        async with opened() as netlink:
            names = {link.index: link.name for link in await netlink.links()}
            present = await self._ours(netlink)
        slots = {name: slot for slot, name in self._tunnels.items()}
        routes = [
            RouteWanted(destination_cidr=r.destination, via=r.gateway, slot=_slot(slots.get(names.get(r.index, ""), "")))
            for r in present
            if not r.is_unreachable
        ]
        if not present:
            return None
        return RoutesObserved(
            routes=tuple(sorted(routes, key=lambda route: (route.destination_cidr, route.via))),
            unreachable_cidrs=tuple(sorted(r.destination for r in present if r.is_unreachable)),
        )

    async def apply(self, plan: RoutePlan) -> RoutesObserved:
        ensure_forwarding()
        wanted = self._wanted(plan)
        async with opened() as netlink:
            present = await self._present(netlink, is_interface_told=bool(plan.data_interface))
            destinations = {route.destination for route in await netlink.routes(PROTOCOL_ROUTES)}
            self._record.write(frozenset(way.destination for way in (*present, *wanted)))
            for way in wanted:
                if way not in present:
                    await netlink.carry_out((way.request("route_replace" if way.destination in destinations else "route_add"),))
            left = await self._present(netlink, is_interface_told=bool(plan.data_interface))
            await netlink.carry_out(tuple(way.request("route_remove") for way in left - set(wanted)))
        self._record.write(frozenset(way.destination for way in wanted))
        return await self.observe() or RoutesObserved(routes=())

    async def remove(self) -> None:
        async with opened() as netlink:
            present = await self._present(netlink, is_interface_told=True)
            await netlink.carry_out(tuple(way.request("route_remove") for way in present))
        self._record.write(frozenset())

    async def _ours(self, netlink: Netlink) -> list[Route]:
        owned = self._record.read()
        return [route for route in await netlink.routes(PROTOCOL_ROUTES) if owned is None or route.destination in owned]

    def _wanted(self, plan: RoutePlan) -> list[Way]:
        """Refusals first: a machine's own route is better anyway, and nothing leaks in between."""
        ways = [Way(destination=cidr, is_unreachable=True) for cidr in plan.wanted.unreachable_cidrs]
        for route in plan.wanted.routes:
            interface = self._tunnels.get(route.slot, f"no slot {route.slot}") if route.slot else plan.data_interface
            ways.append(Way(destination=route.destination_cidr, gateway=route.via, interface=interface))
        return ways

    async def _present(self, netlink: Netlink, *, is_interface_told: bool) -> set[Way]:
        names = {link.index: link.name for link in await netlink.links()}

        def way(route: Route) -> Way:
            if route.is_unreachable:
                return Way(destination=route.destination, is_unreachable=True)
            interface = names.get(route.index, "") if is_interface_told or not route.gateway else ""
            return Way(destination=route.destination, gateway=route.gateway, interface=interface)

        return {way(route) for route in await self._ours(netlink)}


def _slot(found: str) -> Literal["", "a", "b"]:
    return cast("Literal['', 'a', 'b']", found)
