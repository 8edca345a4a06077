"""Which host speaks to which through which tunnel, and by which way packets for a machine go. Pure.

The one rule: a host accepts from every slot in which it knows a peer, and sends by the newest slot in which both have heard
each other. So the two ends need not change over at the same moment, and no packet is lost when they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from controlplane.core import json
from controlplane.core.json import Json
from hostagent.protocol.network import TunnelInterfaceWanted, TunnelPeerWanted, TunnelWanted
from hostagent.protocol.wanted import Generation, NetworkWanted, RouteWanted

Slot = Literal["a", "b"]
TUNNEL = "tunnel"
ROUTES = "routes"
OVERHEAD_BYTES = 80  # outer IPv6 (40), UDP (8), WireGuard (32)
FORMAT = 1  # raise it when the same rows give another document: a generation never names two


def slot_of(key_generation: int) -> Slot:
    return "a" if key_generation % 2 else "b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """`generations`: those that have an interface now, oldest first."""

    key_generation: int = 1
    is_rotating: bool = False

    @property
    def generations(self) -> tuple[int, ...]:
        return (self.key_generation, self.key_generation + 1) if self.is_rotating else (self.key_generation,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One host as the others see it. `encrypted`, `plain`: prefixes of its machines by their network's encryption.

    `keys` by key generation; `heard` by slot; `own`: its addresses in the private pools, "" where it is not in the mesh.
    `projects`: whose machines it has, `encrypted_projects` those in encrypted networks; `serves_all`: an edge or a gateway,
    which speaks to the machines of every project.
    """

    host_id: str
    data: tuple[str, str] = ("", "")
    underlay: tuple[str, str] = ("", "")
    own: tuple[str, ...] = ()
    keys: Mapping[int, str] = field(default_factory=dict)
    heard: Mapping[str, frozenset[str]] = field(default_factory=dict)
    encrypted: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    projects: frozenset[str] = frozenset()
    encrypted_projects: frozenset[str] = frozenset()
    serves_all: bool = False

    @property
    def own_cidrs(self) -> tuple[str, ...]:
        return tuple(f"{address}/{128 if ':' in address else 32}" for address in self.own)

    def digest(self) -> str:
        """Of everything that other hosts' documents say of it."""
        keys: list[Json] = [[generation, key] for generation, key in sorted(self.keys.items())]
        return _digest([[*self.data], [*self.underlay], [*self.own], keys, [*self.encrypted], [*self.plain]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """All hosts that carry machines or serve them. `prefixes`: of encrypted networks."""

    members: Mapping[str, Member]
    rotation: Rotation = Rotation()
    prefixes: tuple[str, ...] = ()
    port: int = 51820
    mtu_bytes: int = 1420

    def tunnel(self, host_id: str, generation: Generation) -> TunnelWanted:
        me = self.members[host_id]
        interfaces = tuple(
            TunnelInterfaceWanted(slot=slot_of(n), listen_port=self._port(n), key_generation=n)
            for n in self.rotation.generations
        )
        peers = [
            TunnelPeerWanted(
                host_id=peer.host_id,
                slot=slot_of(n),
                public_key=peer.keys[n],
                endpoint_address=endpoint(me, peer),
                endpoint_port=self._port(n),
                allowed_cidrs=tuple(sorted({*peer.own_cidrs, *peer.encrypted, *peer.plain})),
            )
            for peer in self.peers(host_id)
            for n in self.rotation.generations
            if n in peer.keys
        ]
        return TunnelWanted(
            id=TUNNEL,
            generation=generation,
            interfaces=interfaces,
            peers=tuple(peers),
            mtu_bytes=self.mtu_bytes,
            addresses=me.own,
        )

    def routes(self, host_id: str, generation: Generation) -> NetworkWanted:
        """Encrypted machines by their host's tunnel, or not at all; plain ones by its data address of their family."""
        found: list[RouteWanted] = []
        peers = {peer.host_id for peer in self.peers(host_id)}
        for other in self.members.values():
            if other.host_id == host_id:
                continue
            for cidr in other.plain:
                via = other.data[":" in cidr]
                found += [RouteWanted(destination_cidr=cidr, via=via)] if via else []
            slot = self.slot_between(host_id, other.host_id) if other.host_id in peers else None
            if slot is not None:
                found += [
                    RouteWanted(destination_cidr=cidr, via="", slot=slot) for cidr in (*other.encrypted, *other.own_cidrs)
                ]
        routes = tuple(sorted(found, key=lambda route: (route.destination_cidr, route.via)))
        return NetworkWanted(id=ROUTES, generation=generation, routes=routes, unreachable_cidrs=self.prefixes)

    def peers(self, host_id: str) -> list[Member]:
        me = self.members[host_id]
        return [other for _, other in sorted(self.members.items()) if are_peers(me, other)]

    def slot_between(self, one: str, other: str) -> Slot | None:
        """None: they have no key generation in common yet."""
        a, b = self.members[one], self.members[other]
        for n in reversed(self.rotation.generations):
            if n not in a.keys or n not in b.keys:
                continue
            slot = slot_of(n)
            is_new = n != self.rotation.key_generation
            if not is_new or (other in a.heard.get(slot, ()) and one in b.heard.get(slot, ())):
                return slot
        return None

    def unmoved(self) -> list[tuple[str, str]]:
        """Pairs of peers that do not use the newest keys yet."""
        newest = slot_of(self.rotation.generations[-1])
        pairs = [(host, peer.host_id) for host in self.members for peer in self.peers(host) if host < peer.host_id]
        return [pair for pair in pairs if self.slot_between(*pair) != newest]

    def tunnel_digest(self, host_id: str, digests: Mapping[str, str]) -> str:
        """Changes when, and only when, something changes that `tunnel` reads. `digests`: `Member.digest` of each."""
        me = self.members[host_id]
        others: list[Json] = [[peer.host_id, digests[peer.host_id], endpoint(me, peer)] for peer in self.peers(host_id)]
        return _digest([FORMAT, [*self.rotation.generations], self.port, self.mtu_bytes, [*me.own], others])

    def routes_digest(self, host_id: str, digests: Mapping[str, str]) -> str:
        peers = {peer.host_id for peer in self.peers(host_id)}
        others: list[Json] = [
            [other, digests[other], self.slot_between(host_id, other) if other in peers else None]
            for other in sorted(self.members)
            if other != host_id
        ]
        return _digest([FORMAT, [*self.prefixes], others])

    def _port(self, key_generation: int) -> int:
        return self.port + (slot_of(key_generation) == "b")


def are_peers(one: Member, other: Member) -> bool:
    """Both in the mesh and within each other's reach, and one of them with encrypted machines that the other has to do with:
    it has machines of the same project, or serves those of all.
    """
    is_possible = one.host_id != other.host_id and one.own and other.own and endpoint(one, other)
    return bool(is_possible) and (_reaches(one, other) or _reaches(other, one))


def _reaches(one: Member, other: Member) -> bool:
    return bool(other.encrypted if one.serves_all else one.projects & other.encrypted_projects)


def endpoint(one: Member, other: Member) -> str:
    """Where `one` sends packets for `other`: IPv4 where both have it."""
    return next((there for here, there in zip(one.underlay, other.underlay, strict=True) if here and there), "")


def members_of(members: Sequence[Member]) -> dict[str, Member]:
    return {member.host_id: member for member in members}


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value)).hexdigest()
