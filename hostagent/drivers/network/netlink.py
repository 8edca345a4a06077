"""Requests to the kernel's network tables, by pyroute2, and what stands in them. The only module that imports pyroute2.

The one rule: a request says what shall be; made already is success. Requests are (verb, attributes) pairs so that they can be
shown and compared before they are carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.drivers.network.tap import make_tap
from hostagent.protocol.errors import AgentError

Attributes = tuple[tuple[str, str | int], ...]
Request = tuple[str, Attributes]

NEIGHBOUR_PERMANENT = 0x80
TABLE_MAIN = 254
RTN_UNREACHABLE = 7
SYSCTL = Path("/proc/sys/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    index: int
    name: str
    kind: str
    mac: str
    mtu_bytes: int
    is_up: bool
    alias: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """`destination` with its prefix length; `gateway` "" = on the link, or nowhere where `is_unreachable`."""

    destination: str
    gateway: str
    index: int
    protocol: int
    is_unreachable: bool = False


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Netlink]:
    """The network namespace of this process."""
    # Compiling it out of the agent's file takes a second: not in the event loop.
    pyroute2 = await asyncio.to_thread(importlib.import_module, "pyroute2")
    async with pyroute2.AsyncIPRoute() as connection:
        yield Netlink(connection)


class Netlink:
    def __init__(self, connection: Any) -> None:
        self._ip = connection

    async def carry_out(self, requests: tuple[Request, ...]) -> None:
        """In order. Raises AgentError `network.refused` with the request that failed."""
        verbs: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
            "tap_add": self._tap_add,
            "veth_add": self._veth_add,
            "link_set": self._link_set,
            "address_add": self._address_add,
            "neighbour_set": self._neighbour_set,
            "route_add": self._route_add,
            "route_replace": self._route_replace,
            "route_remove": self._route_remove,
            "link_up": self._link_up,
            "address_remove": self._address_remove,
            "sysctl": self._sysctl,
            "vxlan_add": self._vxlan_add,
            "forward_set": self._forward_set,
            "rule_add": self._rule_add,
            "rule_remove": self._rule_remove,
        }
        for verb, attributes in requests:
            try:
                await verbs[verb](dict(attributes))
            except OSError as error:
                raise AgentError("network.refused", f"{verb} {dict(attributes)}: {error}") from error
            except Exception as error:
                if not hasattr(error, "code"):
                    raise
                raise AgentError("network.refused", f"{verb} {dict(attributes)}: {error}") from error

    async def links(self) -> list[Link]:
        found = []
        async for message in await self._ip.get_links():
            information = message.get_attr("IFLA_LINKINFO")
            found.append(
                Link(
                    index=message["index"],
                    name=message.get_attr("IFLA_IFNAME"),
                    kind=information.get_attr("IFLA_INFO_KIND") if information else "",
                    mac=message.get_attr("IFLA_ADDRESS") or "",
                    mtu_bytes=message.get_attr("IFLA_MTU") or 0,
                    is_up=bool(message["flags"] & 1),
                    alias=message.get_attr("IFLA_IFALIAS") or "",
                )
            )
        return found

    async def link(self, name: str) -> Link | None:
        found = await self._ip.link_lookup(ifname=name)
        if not found:
            return None
        return next((link for link in await self.links() if link.index == found[0]), None)

    async def addresses(self, index: int) -> set[str]:
        return {
            f"{message.get_attr('IFA_ADDRESS')}/{message['prefixlen']}"
            async for message in await self._ip.get_addr(index=index)
        }

    async def permanent_neighbours(self, index: int) -> set[tuple[str, str]]:
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            async for message in await self._ip.get_neighbours(family, ifindex=index):
                if message["state"] & NEIGHBOUR_PERMANENT:
                    found.add((message.get_attr("NDA_DST"), message.get_attr("NDA_LLADDR")))
        return found

    async def forwards(self, index: int) -> set[tuple[str, str]]:
        """(MAC, far end) of a VXLAN."""
        found = set()
        async for message in await self._ip.get_neighbours(socket.AF_BRIDGE, ifindex=index):
            if message["ifindex"] == index:
                found.add((message.get_attr("NDA_LLADDR"), message.get_attr("NDA_DST")))
        return found

    async def vxlan(self, name: str) -> tuple[int, str] | None:
        """(its number, our end); None where there is none of that name."""
        async for message in await self._ip.get_links(ifname=name):
            information = message.get_attr("IFLA_LINKINFO")
            data = information.get_attr("IFLA_INFO_DATA") if information is not None else None
            if information is None or data is None or information.get_attr("IFLA_INFO_KIND") != "vxlan":
                return None
            return data.get_attr("IFLA_VXLAN_ID"), data.get_attr("IFLA_VXLAN_LOCAL") or ""
        return None

    async def marks(self, protocol: int) -> set[tuple[int, int, int]]:
        """(address family, mark, table) of the rules with this routing protocol number."""
        found = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            async for message in await self._ip.get_rules(family=family):
                if message.get_attr("FRA_PROTOCOL") == protocol:
                    found.add((int(family), message.get_attr("FRA_FWMARK") or 0, message.get_attr("FRA_TABLE") or 0))
        return found

    async def routes(self, protocol: int, table: int = TABLE_MAIN) -> list[Route]:
        """Of one table, with this routing protocol number."""
        found = []
        for family, bits in ((socket.AF_INET, 32), (socket.AF_INET6, 128)):
            async for message in await self._ip.get_routes(family, table=table, proto=protocol):
                if message["proto"] != protocol or message.get_attr("RTA_TABLE", TABLE_MAIN) != table:
                    continue
                destination = message.get_attr("RTA_DST") or ("0.0.0.0" if bits == 32 else "::")
                found.append(
                    Route(
                        destination=f"{destination}/{message['dst_len']}",
                        gateway=message.get_attr("RTA_GATEWAY") or "",
                        index=message.get_attr("RTA_OIF") or 0,
                        protocol=protocol,
                        is_unreachable=message["type"] == RTN_UNREACHABLE,
                    )
                )
        return found

    async def make_wireguard(self, name: str) -> bool:
        """False where the kernel has no WireGuard."""
        try:
            await self._ip.link("add", ifname=name, kind="wireguard")
        except Exception as error:
            code = getattr(error, "code", None)
            if code not in (errno.EOPNOTSUPP, errno.EEXIST):
                raise
            return code == errno.EEXIST
        return True

    async def remove_link(self, name: str) -> None:
        """Absent is success."""
        link = await self.link(name)
        if link is not None:
            with self._accepting(errno.ENODEV):
                await self._ip.link("del", index=link.index)

    async def _index(self, name: str) -> int:
        found = await self._ip.link_lookup(ifname=name)
        if not found:
            raise AgentError("network.interface_missing", f"there is no interface {name}")
        return found[0]

    @staticmethod
    @contextlib.contextmanager
    def _accepting(*codes: int) -> Any:
        try:
            yield
        except Exception as error:
            if getattr(error, "code", None) not in codes:
                raise

    async def _tap_add(self, a: dict[str, Any]) -> None:
        make_tap(a["name"], uid=a["uid"], is_multi_queue=a["queues"] > 1)

    async def _veth_add(self, a: dict[str, Any]) -> None:
        if await self.link(a["name"]) is None:
            await self._ip.link("add", ifname=a["name"], kind="veth", peer={"ifname": a["peer"], "address": a["peer_mac"]})

    async def _link_set(self, a: dict[str, Any]) -> None:
        index = await self._index(a["name"])
        wanted = {"mtu": a["mtu"], "address": a["mac"], "ifalias": a["alias"]}
        await self._ip.link("set", index=index, **wanted)
        await self._ip.link("set", index=index, state="up")

    async def _link_up(self, a: dict[str, Any]) -> None:
        index = await self._index(a["name"])
        await self._ip.link("set", index=index, mtu=a["mtu"], ifalias=a["alias"])
        await self._ip.link("set", index=index, state="up")

    async def _address_remove(self, a: dict[str, Any]) -> None:
        address, _, length = a["address"].partition("/")
        with self._accepting(errno.EADDRNOTAVAIL):
            await self._ip.addr("del", index=await self._index(a["name"]), address=address, prefixlen=int(length))

    async def _address_add(self, a: dict[str, Any]) -> None:
        address, _, length = a["address"].partition("/")
        nodad: dict[str, Any] = {"flags": 0x02} if ":" in address else {}
        if a.get("passive") and nodad:  # no packet of the host's own takes it as its source
            nodad["IFA_CACHEINFO"] = {"ifa_preferred": 0, "ifa_valid": 0xFFFF_FFFF}
        with self._accepting(errno.EEXIST):
            await self._ip.addr("add", index=await self._index(a["name"]), address=address, prefixlen=int(length), **nodad)

    async def _neighbour_set(self, a: dict[str, Any]) -> None:
        family = socket.AF_INET6 if ":" in a["address"] else socket.AF_INET
        index = await self._index(a["name"])
        await self._ip.neigh(
            "replace", family=family, ifindex=index, dst=a["address"], lladdr=a["mac"], state=NEIGHBOUR_PERMANENT
        )

    async def _route_add(self, a: dict[str, Any]) -> None:
        with self._accepting(errno.EEXIST):
            await self._ip.route("add", **await self._route_attributes(a))

    async def _route_replace(self, a: dict[str, Any]) -> None:
        """Packets find the old way or the new one, never none."""
        await self._ip.route("replace", **await self._route_attributes(a))

    async def _route_remove(self, a: dict[str, Any]) -> None:
        with self._accepting(errno.ESRCH):
            await self._ip.route("del", **await self._route_attributes(a))

    async def _route_attributes(self, a: dict[str, Any]) -> dict[str, Any]:
        family = socket.AF_INET6 if ":" in a["destination"] else socket.AF_INET
        attributes: dict[str, Any] = {
            "family": family,
            "dst": str(ipaddress.ip_network(a["destination"])),
            "proto": a["protocol"],
            "table": a.get("table") or TABLE_MAIN,
        }
        if a.get("unreachable"):
            return attributes | {"type": "unreachable", "priority": a["metric"]}
        if a.get("interface"):
            attributes["oif"] = await self._index(a["interface"])
        if a.get("gateway"):
            attributes["gateway"] = a["gateway"]
            attributes |= {"flags": ["onlink"]} if a.get("onlink") else {}
        elif family == socket.AF_INET:
            attributes["scope"] = 253  # link
        if a.get("metric"):
            attributes["priority"] = a["metric"]
        return attributes

    async def _vxlan_add(self, a: dict[str, Any]) -> None:
        """Without learning: what it carries goes where `forward_set` says, and nothing is flooded."""
        await self._ip.link(
            "add",
            ifname=a["name"],
            kind="vxlan",
            vxlan_id=a["network"],
            vxlan_local=a["local"],
            vxlan_port=a["port"],
            vxlan_learning=False,
            address=a["mac"],
            ifalias=a["alias"],
        )

    async def _forward_set(self, a: dict[str, Any]) -> None:
        with self._accepting(errno.EEXIST):
            await self._ip.fdb("add", ifindex=await self._index(a["name"]), lladdr=a["mac"], dst=a["far_end"])

    async def _rule_add(self, a: dict[str, Any]) -> None:
        with self._accepting(errno.EEXIST):
            await self._ip.rule("add", **_rule(a))

    async def _rule_remove(self, a: dict[str, Any]) -> None:
        with self._accepting(errno.ENOENT):
            await self._ip.rule("del", **_rule(a))

    async def _sysctl(self, a: dict[str, Any]) -> None:
        set_sysctl(a["key"], str(a["value"]))


def _rule(a: dict[str, Any]) -> dict[str, Any]:
    return {
        "family": a["family"],
        "fwmark": a["mark"],
        "fwmask": a["mask"],
        "table": a["table"],
        "priority": a["priority"],
        "protocol": a["protocol"],
    }


def sysctl(key: str) -> str:
    """The value of `net.<key>`, with slashes; raises OSError."""
    return (SYSCTL / key).read_text(encoding="ascii").strip()


def set_sysctl(key: str, value: str) -> None:
    if sysctl(key) != value:
        (SYSCTL / key).write_text(value, encoding="ascii")
