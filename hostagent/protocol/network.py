"""Wanted documents of the network: firewalls, host policy, tunnels, reserved addresses, load balancers.

The one rule: references are resolved before they travel. A document holds addresses and prefixes, never names of networks or
other firewalls, so that a host can carry it out alone after a reboot. Prefixes are normalised (no host bits) and sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hostagent.protocol.wanted import Generation

FirewallProtocol = Literal["tcp", "udp", "icmp", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallRuleWanted:
    """`icmp` is ICMP and ICMPv6. `port_first` = `port_last` = 0 means every port; otherwise both within 1–65535.

    `cidrs` holds IPv4 and IPv6 prefixes: the far end (source for ingress, destination for egress). A deny wins over an allow.
    """

    direction: Literal["ingress", "egress"]
    action: Literal["allow", "deny"]
    protocol: FirewallProtocol
    cidrs: tuple[str, ...]
    port_first: int = 0
    port_last: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallMemberWanted:
    """One nic on this host to which the firewall applies."""

    nic_id: str
    ipv4: str
    ipv6: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirewallWanted:
    """One firewall with those of its members that live on this host. A nic in no firewall: deny in, allow out.

    With egress allows in any of its firewalls, a nic's egress is only what they allow; without, everything not denied.
    """

    id: str
    generation: Generation
    rules: tuple[FirewallRuleWanted, ...]
    members: tuple[FirewallMemberWanted, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BgpPeerWanted:
    """A router. `password`: of TCP MD5 signatures (RFC 2385); "": none."""

    address: str
    peer_as: int
    password: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BgpWanted:
    """Which routers are told of reserved addresses that are announced by BGP. `port` is this host's own."""

    local_as: int
    peers: tuple[BgpPeerWanted, ...]
    port: int = 179
    revision: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWanted:
    """What holds for every machine of this host. Id is always `policy`.

    `infrastructure_cidrs`: denied from machines (hosts, control plane, management). `private_cidrs`: the operator's pools;
    traffic from there to anywhere else leaves masqueraded behind the host unless a reserved address is attached. Until
    `is_enforced` the host filters and masquerades nothing. `bgp` None: as the host's own `host.toml` says.
    """

    id: str
    generation: Generation
    infrastructure_cidrs: tuple[str, ...] = ()
    private_cidrs: tuple[str, ...] = ()
    is_enforced: bool = False
    bgp: BgpWanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelInterfaceWanted:
    """One WireGuard interface. Its keys are made on the host for (slot, key_generation); only the public half is observed."""

    slot: Literal["a", "b"]
    listen_port: int
    key_generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPeerWanted:
    """Another host. `slot` says through which interface of ours it is reached; `endpoint` is its data address and port.

    While keys are rotated a host is there twice, once in each slot. `keepalive_seconds` 0: only traffic keeps it warm.
    """

    host_id: str
    slot: Literal["a", "b"]
    public_key: str
    endpoint_address: str
    endpoint_port: int
    allowed_cidrs: tuple[str, ...]
    keepalive_seconds: int = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelWanted:
    """All WireGuard interfaces and peers of this host. Id is always `tunnel`.

    `addresses`: the host's own, inside the private pools; it speaks with them into encrypted networks.
    """

    id: str
    generation: Generation
    interfaces: tuple[TunnelInterfaceWanted, ...]
    peers: tuple[TunnelPeerWanted, ...] = ()
    mtu_bytes: int = 1420
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressWanted:
    """A reserved address held by this host: 1:1 NAT to `private_address` (a machine here), or, when that is empty, a VIP.

    `standby_for`: it is held by that other host; this one takes it when that one is dead, and only then.
    """

    id: str
    generation: Generation
    address: str
    private_address: str = ""
    announce: Literal["none", "arp", "bgp"] = "arp"
    standby_for: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeWanted:
    """A health check that the agent makes, for each address family of each backend. `port` 0 is the backend's own.

    A backend is up after `rise` answers in a row and down after `fall` failures. `path`, `host`, `expected_*`: HTTP and HTTPS;
    an empty `expected_body` matches everything. `service`: gRPC health.
    """

    kind: Literal["tcp", "http", "https", "grpc"]
    interval_ms: int = 2000
    timeout_ms: int = 1000
    rise: int = 2
    fall: int = 3
    port: int = 0
    path: str = "/"
    host: str = ""
    expected_status_first: int = 200
    expected_status_last: int = 399
    expected_body: str = ""
    is_tls_verified: bool = False
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerWanted:
    protocol: Literal["tcp", "udp"]
    port: int
    target_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendWanted:
    """One backend; `ipv4` or `ipv6` may be empty. `nic_id` names the machine when it lives on this very host.

    `weight` 1–256 shares the buckets. `draining` takes no new flows, `ejected` neither and drops the old ones, for
    `ejected_seconds` from when the host first read so (0: until the document says otherwise). `removed`: gone, listed only so
    that its leaving moves nobody else's flows; it may be left out with the next change of members. At most 251 backends.
    `reply`: how what it answers to a kept client address comes back: by itself, by an edge way, or only when it is masqueraded.
    """

    id: str
    ipv4: str = ""
    ipv6: str = ""
    weight: int = 1
    state: Literal["active", "draining", "ejected", "removed"] = "active"
    nic_id: str = ""
    host_id: str = ""
    ejected_seconds: int = 0
    reply: Literal["direct", "way", "masqueraded"] = "direct"


@dataclass(frozen=True, slots=True, kw_only=True)
class CircuitWanted:
    """A backend with at least `errors` resets or failed handshakes in `window_ms` is out, and tried again after `open_ms`."""

    errors: int = 20
    window_ms: int = 10_000
    open_ms: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalancerWanted:
    """A service at `vips` (IPv4 and IPv6), balanced by this host as one of its edges.

    Limits of 0 are none. `established_timeout_seconds`/`idle` come from the service's timeout profile; 0 keeps the kernel's.
    `client_address` "kept": of backends whose replies come back through this edge (`BackendWanted.reply`).
    `source_ipv4`, `source_ipv6`: where a masqueraded flow comes from; empty: the kernel chooses by the way out.
    """

    id: str
    generation: Generation
    vips: tuple[str, ...]
    listeners: tuple[ListenerWanted, ...]
    backends: tuple[BackendWanted, ...]
    algorithm: Literal["hash", "round_robin", "random"] = "hash"
    hash_on: Literal["source", "source_port"] = "source_port"
    probe: ProbeWanted | None = None
    established_timeout_seconds: int = 0
    udp_timeout_seconds: int = 0
    new_connections_per_second_per_source: int = 0
    connections_per_source: int = 0
    drain_seconds: int = 30
    slow_start_seconds: int = 0
    client_address: Literal["kept", "masqueraded"] = "masqueraded"
    circuit: CircuitWanted | None = None
    source_ipv4: str = ""
    source_ipv6: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticePeerWanted:
    """Another host with which this one exchanges heartbeats on the data network, signed by a key of the two alone.

    `key`: 32 bytes as hex. `sends`: backends of this host of whose end the other, an edge, is told. `accepts`: backends of the
    other host that it may take down here; anything else it says is ignored. A backend is named by its nic's id.
    """

    host_id: str
    address: str
    port: int
    key: str
    sends: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticesWanted:
    """Whom this host tells of ended machines, and whom it listens to. Id is always `notices`. Sealed at rest."""

    id: str
    generation: Generation
    host_id: str
    listen_address: str
    listen_port: int
    peers: tuple[NoticePeerWanted, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOutWanted:
    """From this edge to another host: `address` is its own in tunnels, `destinations` its backends' (IPv4 and IPv6)."""

    host_id: str
    address: str
    destinations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WayInWanted:
    """From an edge to this host. `network`: the edge's number (24 bits), the same on all of its ways.

    `accepts`: what the edge may open here, as (address of a machine, protocol, port); everything else is dropped.
    """

    host_id: str
    address: str
    network: int
    accepts: tuple[tuple[str, Literal["tcp", "udp"], int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeWaysWanted:
    """The ways by which clients' addresses are kept: from edges to hosts of backends, and back, inside the hosts' tunnels.

    Id is always `edgeways`. `address`: this host's own in tunnels. `network`: its number as an edge; 0 when it is none.
    """

    id: str
    generation: Generation
    host_id: str
    address: str
    network: int = 0
    mtu_bytes: int = 1370
    outward: tuple[WayOutWanted, ...] = ()
    inward: tuple[WayInWanted, ...] = ()
