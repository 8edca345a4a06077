"""How hosts reach each other and are reached: tunnels, held addresses, routers that are told. Behind few words each.

The one rule: what is right already is not touched, so that whatever uses it lives through every change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hostagent.drivers.network.rival import RivalWatch
from hostagent.lib.process import Incarnation
from hostagent.protocol.network import BgpWanted, EdgeWaysWanted, TunnelWanted


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressTraits:
    name: Literal["announce", "fake"]


class AddressDriver(Protocol):
    """Addresses that this host answers for, besides its own."""

    traits: AddressTraits
    rivals: RivalWatch
    """Who hears that somebody else says to have a guarded address."""

    async def held_on(self, address: str) -> str:
        """The interface that has it; "" where none has."""
        ...

    async def apply(self, address: str, *, is_announced: bool) -> str:
        """Held afterwards, and neighbours are told if `is_announced`; the interface. Raises AgentError."""
        ...

    async def guard(self, address: str) -> None:
        """Hear of rivals from now on, also for what an earlier process held. Twice is once."""
        ...

    async def is_answered(self, address: str) -> bool:
        """Whether another host on the link has it: asked several times, within a third of a second."""
        ...

    async def defend(self, address: str) -> None:
        """Tell the neighbours once more."""
        ...

    async def remove(self, address: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerTraits:
    name: Literal["bird", "fake"]


class SpeakerDriver(Protocol):
    """Tells routers which addresses are reached by this host. `routers` None: those that the host's own configuration names."""

    traits: SpeakerTraits

    async def is_up(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> bool:
        """Whether exactly these are told."""
        ...

    async def apply(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTraits:
    name: Literal["vxlan", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaysMade:
    """`outward`: the interface to all hosts of backends, "" on a host that is no edge. `inward`: by edge, the one from it.

    `numbers`: by edge, what stands for it in marks here; remembered while it is wanted.
    """

    outward: str
    inward: dict[str, str]
    numbers: dict[str, int]


class WayDriver(Protocol):
    """Ways between edges and hosts of backends, in which packets keep their clients' addresses."""

    traits: WayTraits

    def plan(self, wanted: EdgeWaysWanted) -> WaysMade:
        """The names and numbers that `apply` gives. Raises AgentError `edgeways.exhausted`."""
        ...

    async def differences(self, wanted: EdgeWaysWanted) -> tuple[str, ...] | None:
        """What is not as wanted, in words; None = there is nothing of ours."""
        ...

    async def apply(self, wanted: EdgeWaysWanted) -> None: ...

    async def remove(self) -> None:
        """Absent is success."""
        ...
