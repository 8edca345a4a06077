"""Links of machines and routes to other hosts, behind five words each.

The one rule: an interface's name is derived from the nic's id (`interface_name`), so that what is found in the kernel is
recognised without a register. Host side of every link: MAC 02:00:00:00:00:01, 169.254.1.1/32, fe80::1/64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from hostagent.drivers.machine.protocol import NicKind
from hostagent.lib.process import Incarnation
from hostagent.protocol.network import TunnelWanted
from hostagent.protocol.wanted import NetworkWanted, NicWanted, RouteWanted

HOST_MAC = "02:00:00:00:00:01"
HOST_IPV4 = "169.254.1.1"
HOST_IPV6 = "fe80::1"


def interface_name(nic_id: str) -> str:
    """At most 15 bytes (IFNAMSIZ): `bp` and the random last 12 characters of the id."""
    return f"bp{nic_id[-12:]}"


def peer_name(nic_id: str) -> str:
    """The far end of a container's veth, before the machine driver renames it inside."""
    return f"bq{nic_id[-12:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraits:
    name: Literal["links", "fake"]
    kinds: frozenset[NicKind]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """`uid` owns the tap. `data_interface` is the operator's declared data network ("" when none)."""

    nic: NicWanted
    kind: NicKind
    interface: str
    peer: str = ""
    uid: int = 0
    queues: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRendered:
    """Requests to the kernel in order, as (verb, attributes) pairs, for golden tests and `--dry-run`."""

    requests: tuple[tuple[str, tuple[tuple[str, str | int], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkObserved:
    """`is_complete`: the link is up and has its routes, addresses and permanent neighbours; else `apply` has work to do."""

    nic_id: str
    interface: str
    kind: NicKind
    is_complete: bool
    mtu_bytes: int


class LinkDriver(Protocol):
    traits: LinkTraits

    def render(self, plan: LinkPlan) -> LinkRendered: ...

    async def observe(self, plan: LinkPlan) -> LinkObserved | None:
        """None = no such interface (nor, for a veth whose peer is inside a machine, its host end)."""
        ...

    async def apply(self, plan: LinkPlan) -> LinkObserved: ...

    async def remove(self, interface: str) -> None:
        """Link, routes and neighbours gone. Absent is success."""
        ...

    async def interfaces(self) -> tuple[str, ...]:
        """All links of this agent in the kernel, also those no document knows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTraits:
    name: Literal["routes", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutePlan:
    """All routes to machines on other hosts; `data_interface` "" lets the kernel choose the way to `via`."""

    wanted: NetworkWanted
    data_interface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutesObserved:
    routes: tuple[RouteWanted, ...]
    unreachable_cidrs: tuple[str, ...] = ()


class RouteDriver(Protocol):
    """Replaces the agent's own routes (told apart by their routing protocol number), and touches no other."""

    traits: RouteTraits

    def render(self, plan: RoutePlan) -> LinkRendered: ...

    async def observe(self) -> RoutesObserved | None:
        """None = no route of the agent's."""
        ...

    async def apply(self, plan: RoutePlan) -> RoutesObserved: ...

    async def remove(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelTraits:
    name: Literal["wireguard", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelInterfaceObserved:
    """`driver`: who carries its packets. `incarnation`: of the process that does, if one does."""

    slot: str
    interface: str
    driver: Literal["kernel", "userspace"]
    public_key: str
    listen_port: int
    heard_host_ids: tuple[str, ...] = ()
    incarnation: Incarnation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelsObserved:
    """`differences`: what is not as wanted, in words; empty when all is. `heard_host_ids`: peers with a fresh handshake."""

    interfaces: tuple[TunnelInterfaceObserved, ...]
    differences: tuple[str, ...] = ()


class TunnelDriver(Protocol):
    """All WireGuard interfaces of this host. What is right already is not touched: sessions go on."""

    traits: TunnelTraits

    async def observe(self, wanted: TunnelWanted | None) -> TunnelsObserved | None:
        """None = there is no interface of ours."""
        ...

    async def apply(self, wanted: TunnelWanted) -> TunnelsObserved:
        """Interfaces and peers that are wanted come first, what is not wanted goes last."""
        ...

    async def remove(self) -> None:
        """Interfaces, processes and keys gone. Absent is success."""
        ...
