"""Links of machines: routed taps and veths.

The one rule: every link looks the same from inside (gateway 169.254.1.1 and fe80::1 at 02:00:00:00:00:01) and a machine's
addresses are permanent neighbours, so what a guest says by ARP or ND changes nothing. Other links and routes are never touched:
ours are known by their name, and by their routing protocol number.
"""

from __future__ import annotations

import re

from hostagent.drivers.network.netlink import SYSCTL, Attributes, Link, Netlink, Request, opened, set_sysctl, sysctl
from hostagent.drivers.network.protocol import (
    HOST_IPV4,
    HOST_IPV6,
    HOST_MAC,
    LinkObserved,
    LinkPlan,
    LinkRendered,
    LinkTraits,
)
from hostagent.protocol.wanted import NicWanted

PROTOCOL_LINKS = 190  # free in iproute2's rt_protos
HOST_ADDRESSES = (f"{HOST_IPV4}/32", f"{HOST_IPV6}/64")
NAME = re.compile(r"bp[0-9a-z]{12}")
KINDS = frozenset({"tun", "veth"})


def alias_of(nic_id: str, owner: str) -> str:
    return f"bedplate {nic_id} {owner}".rstrip()


def is_of(owner: str, alias: str) -> bool:
    """Whether a link is this agent's by its alias; one that names no owner is whoever's asks."""
    return alias.split(" ")[2:] in ([], [owner])


class LinkSet:
    """`owner` tells this agent's links from those of another in the same network namespace."""

    traits = LinkTraits(name="links", kinds=frozenset({"tap", "veth"}))

    def __init__(self, owner: str = "") -> None:
        self._owner = owner

    def render(self, plan: LinkPlan) -> LinkRendered:
        name, nic = plan.interface, plan.nic
        first: Attributes
        if plan.kind == "tap":
            first = (("name", name), ("uid", plan.uid), ("queues", plan.queues))
        else:
            first = (("name", name), ("peer", plan.peer), ("peer_mac", nic.mac))
        link = (("name", name), ("mac", HOST_MAC), ("mtu", nic.mtu_bytes), ("alias", alias_of(nic.id, self._owner)))
        requests: list[Request] = [("tap_add" if plan.kind == "tap" else "veth_add", first)]
        requests += [("sysctl", (("key", key), ("value", value))) for key, value in _sysctls(name)]
        requests.append(("link_set", link))
        requests += [("address_add", (("name", name), ("address", address))) for address in HOST_ADDRESSES]
        for address, destination in _destinations(nic):
            requests.append(("neighbour_set", (("name", name), ("address", address), ("mac", nic.mac))))
            route = (("destination", destination), ("interface", name), ("protocol", PROTOCOL_LINKS))
            requests.append(("route_add", route))
        return LinkRendered(requests=tuple(requests))

    async def observe(self, plan: LinkPlan) -> LinkObserved | None:
        async with opened() as netlink:
            return await self._observe(netlink, plan)

    async def apply(self, plan: LinkPlan) -> LinkObserved:
        ensure_forwarding()
        async with opened() as netlink:
            observed = await self._observe(netlink, plan)
            if observed is None or not observed.is_complete:
                await self._drop_other_kind(netlink, plan)
                await netlink.carry_out(self.render(plan).requests)
                observed = await self._observe(netlink, plan)
        assert observed is not None
        return observed

    async def remove(self, interface: str) -> None:
        if NAME.fullmatch(interface) is None:
            raise ValueError(f"{interface} is not a link of this agent")
        async with opened() as netlink:
            await netlink.remove_link(interface)

    async def interfaces(self) -> tuple[str, ...]:
        async with opened() as netlink:
            ours = [link for link in await netlink.links() if NAME.fullmatch(link.name) and link.kind in KINDS]
            return tuple(link.name for link in ours if is_of(self._owner, link.alias))

    async def _drop_other_kind(self, netlink: Netlink, plan: LinkPlan) -> None:
        link = await netlink.link(plan.interface)
        if link is not None and link.kind != _kernel_kind(plan):
            await netlink.remove_link(plan.interface)

    async def _observe(self, netlink: Netlink, plan: LinkPlan) -> LinkObserved | None:
        link = await netlink.link(plan.interface)
        if link is None or link.kind != _kernel_kind(plan):
            return None
        return LinkObserved(
            nic_id=plan.nic.id,
            interface=plan.interface,
            kind=plan.kind,
            is_complete=await self._is_complete(netlink, link, plan),
            mtu_bytes=link.mtu_bytes,
        )

    async def _is_complete(self, netlink: Netlink, link: Link, plan: LinkPlan) -> bool:
        wanted = _destinations(plan.nic)
        if not link.is_up or link.mac != HOST_MAC or link.mtu_bytes != plan.nic.mtu_bytes:
            return False
        if not set(HOST_ADDRESSES) <= await netlink.addresses(link.index):
            return False
        neighbours = await netlink.permanent_neighbours(link.index)
        if not {(address, plan.nic.mac) for address, _ in wanted} <= neighbours:
            return False
        routes = {route.destination for route in await netlink.routes(PROTOCOL_LINKS) if route.index == link.index}
        return {destination for _, destination in wanted} <= routes and all(sysctl(k) == v for k, v in _sysctls(link.name))


def way_sysctls(name: str) -> tuple[tuple[str, str], ...]:
    """Of an interface between hosts. Packets may come in by another than their answers leave by (clients from anywhere, keys
    that are rotated), so the reverse path is checked loosely.
    """
    return (
        (f"ipv4/conf/{name}/rp_filter", "2"),
        (f"ipv4/conf/{name}/forwarding", "1"),
        (f"ipv4/conf/{name}/accept_redirects", "0"),
        (f"ipv4/conf/{name}/send_redirects", "0"),
        (f"ipv6/conf/{name}/accept_ra", "0"),
        (f"ipv6/conf/{name}/accept_redirects", "0"),
    )


def ensure_forwarding() -> None:
    """Make this namespace a router. An uplink that learns its way by router advertisements goes on doing so."""
    if sysctl("ipv6/conf/all/forwarding") != "1":
        for directory in (SYSCTL / "ipv6/conf").iterdir():
            if directory.name != "all" and sysctl(f"ipv6/conf/{directory.name}/accept_ra") == "1":
                set_sysctl(f"ipv6/conf/{directory.name}/accept_ra", "2")
        set_sysctl("ipv6/conf/all/forwarding", "1")
    set_sysctl("ipv4/ip_forward", "1")


def _kernel_kind(plan: LinkPlan) -> str:
    return "tun" if plan.kind == "tap" else "veth"


def _destinations(nic: NicWanted) -> tuple[tuple[str, str], ...]:
    """(address, route) of each family that the nic has."""
    both = ((nic.ipv4, f"{nic.ipv4}/32"), (nic.ipv6, f"{nic.ipv6}/128"))
    return tuple(pair for pair in both if pair[0])


def _sysctls(name: str) -> tuple[tuple[str, str], ...]:
    """No address made by itself, no router believed, no answer for addresses of other links, no proxying."""
    v4, v6 = f"ipv4/conf/{name}", f"ipv6/conf/{name}"
    return (
        (f"{v6}/disable_ipv6", "0"),
        (f"{v6}/addr_gen_mode", "1"),
        (f"{v6}/accept_ra", "0"),
        (f"{v6}/accept_redirects", "0"),
        (f"{v6}/proxy_ndp", "0"),
        (f"{v4}/forwarding", "1"),
        (f"{v4}/proxy_arp", "0"),
        (f"{v4}/arp_ignore", "1"),
        (f"{v4}/accept_redirects", "0"),
        (f"{v4}/send_redirects", "0"),
    )
