"""What firewalls, nics and the host's policy have in the table, as parts. Pure.

The one rule: a packet of a machine meets as many lookups as its own firewalls need, however many machines, firewalls and rules
the host has. A nic is an element of maps; a firewall is interval sets of its own; which sets a nic looks into is said by a pair
of chains for each distinct combination of firewalls: all denies first, then all allows.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping

from hostagent.drivers.network.firewall_sets import Box, Version, addresses_of, box_text, boxes, range_text
from hostagent.drivers.network.protocol import RulePart, SetSpec, interface_name
from hostagent.drivers.network.table import LINKS, MARK_BACKEND_MASK, TUNNELS
from hostagent.protocol.network import FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import NicWanted

OPEN, CLOSED = "out_open", "in_closed"
REVOKED_SECONDS = 3600
FEW = "limit rate 4/hour burst 4 packets"
COUNTERS = (
    "spoofed_mac",
    "spoofed_ipv4",
    "spoofed_ipv6",
    "spoofed_nd",
    "to_host",
    "to_infrastructure",
    "denied_in",
    "denied_out",
)
ARP_COUNTER = "a_spoofed_arp"
KINDS = tuple((direction, action) for direction in ("ingress", "egress") for action in ("deny", "allow"))
VERSIONS: tuple[Version, ...] = (4, 6)

_FAR = {("ingress", 4): "ip saddr", ("ingress", 6): "ip6 saddr", ("egress", 4): "ip daddr", ("egress", 6): "ip6 daddr"}
_INTERVALS = {
    version: SetSpec(
        declaration=f"type inet_proto . inet_service . ipv{version}_addr; flags interval;",
        key=("inet_proto", "inet_service", "ipv4_addr" if version == 4 else "ipv6_addr"),
    )
    for version in VERSIONS
}
_PREFIXES = {
    version: SetSpec(
        declaration=f"type ipv{version}_addr; flags interval;", key=("ipv4_addr" if version == 4 else "ipv6_addr",)
    )
    for version in VERSIONS
}
_REVOKED = {
    version: SetSpec(
        declaration=(
            f"type ipv{version}_addr . ipv{version}_addr . inet_proto . inet_service . inet_service; "
            f"size 65535; timeout {REVOKED_SECONDS}s;"
        ),
        key=(
            "ipv4_addr" if version == 4 else "ipv6_addr",
            "ipv4_addr" if version == 4 else "ipv6_addr",
            "inet_proto",
            "inet_service",
            "inet_service",
        ),
    )
    for version in VERSIONS
}
_SETS: dict[str, SetSpec] = {
    "m_in": SetSpec(declaration="type ifname : verdict;", key=("ifname",), data=("verdict",)),
    "m_out": SetSpec(declaration="type ifname : verdict;", key=("ifname",), data=("verdict",)),
    "s_hardware": SetSpec(declaration="type ifname . ether_addr;", key=("ifname", "ether_addr")),
    "s_source4": SetSpec(declaration="type ifname . ether_addr . ipv4_addr;", key=("ifname", "ether_addr", "ipv4_addr")),
    "s_source6": SetSpec(declaration="type ifname . ether_addr . ipv6_addr;", key=("ifname", "ether_addr", "ipv6_addr")),
    "s_target6": SetSpec(declaration="typeof iifname . @th,64,128;", key=("ifname", "number128")),
    "a_source": SetSpec(
        declaration="type ifname . ether_addr . ether_addr . ipv4_addr;",
        key=("ifname", "ether_addr", "ether_addr", "ipv4_addr"),
    ),
    "s_linklocal": SetSpec(
        declaration="type ifname . ipv6_addr; size 65535; flags dynamic,timeout; timeout 1h;", key=("ifname", "ipv6_addr")
    ),
    "s_linklocal_rate": SetSpec(declaration="type ifname; size 65535; flags dynamic,timeout; timeout 2h;", key=("ifname",)),
    **{f"s_infrastructure{version}": _PREFIXES[version] for version in VERSIONS},
    **{f"s_private{version}": _PREFIXES[version] for version in VERSIONS},
    **{f"s_revoked{version}": _REVOKED[version] for version in VERSIONS},
}
_CHAINS: dict[str, tuple[str, ...]] = {
    "early_machine": (  # what every packet of a machine meets comes first
        "iifname . ether saddr . ip saddr @s_source4 return",
        "icmpv6 type nd-neighbor-advert @th,64,10 != 0x3fa iifname . @th,64,128 != @s_target6 counter name spoofed_nd drop",
        "iifname . ether saddr . ip6 saddr @s_source6 return",
        "iifname . ether saddr != @s_hardware counter name spoofed_mac drop",
        # What guests say before they have an address: duplicate address detection is the one thing that is let through.
        "ip6 saddr :: icmpv6 type nd-neighbor-solicit return",
        "ip6 saddr :: icmpv6 type { 143, nd-router-solicit } drop",
        "ip saddr 0.0.0.0 udp dport 67 drop",
        # Link-local addresses are a guest's own choice. A few an hour: each may become a neighbour of the host.
        "ip6 saddr fe80::1 counter name spoofed_ipv6 drop",
        "ip6 saddr fe80::/10 iifname . ip6 saddr @s_linklocal return",
        f"ip6 saddr fe80::/10 update @s_linklocal_rate {{ iifname {FEW} }} add @s_linklocal {{ iifname . ip6 saddr }} return",
        "meta nfproto ipv6 counter name spoofed_ipv6 drop",
        "counter name spoofed_ipv4 drop",
    ),
    "input_machine": (
        f"iifname != {LINKS} return",
        "ct state established,related accept",
        "ip6 hoplimit 255 icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept",
        "icmpv6 type { 143, nd-router-solicit } drop",
        "counter name to_host drop",
    ),
    "forward_mtu": ("tcp flags syn / syn,rst tcp option maxseg size set rt mtu",),
    "forward_machine": (f"iifname {LINKS} jump machine_out", f"oifname {LINKS} jump machine_in"),
    "machine_out": (
        "ct state invalid counter name denied_out drop",
        "ip daddr 169.254.0.0/16 counter name to_infrastructure drop",
        "ip daddr @s_infrastructure4 counter name to_infrastructure drop",
        "ip6 daddr @s_infrastructure6 counter name to_infrastructure drop",
        "ip saddr . ip daddr . meta l4proto . th sport . th dport @s_revoked4 goto machine_revoked",
        "ip6 saddr . ip6 daddr . meta l4proto . th sport . th dport @s_revoked6 goto machine_revoked",
        "iifname vmap @m_out",
        "counter name denied_out drop",
    ),
    "machine_in": (
        # What a load balancer of this host sends to a backend is let in by the load balancer itself.
        f"ct status dnat ct mark & {MARK_BACKEND_MASK:#x} != 0 return",
        "ct state invalid counter name denied_in drop",
        "ip daddr . ip saddr . meta l4proto . th dport . th sport @s_revoked4 goto machine_revoked",
        "ip6 daddr . ip6 saddr . meta l4proto . th dport . th sport @s_revoked6 goto machine_revoked",
        "oifname vmap @m_in",
        "counter name denied_in drop",
    ),
    "machine_revoked": ("meta l4proto tcp reject with tcp reset", "reject with icmpx admin-prohibited"),
    OPEN: ("return",),
    CLOSED: ("counter name denied_in drop",),
    "srcnat_machine": (
        f"oifname {LINKS} return",
        f"oifname {TUNNELS} return",
        "ip saddr @s_private4 ip daddr != @s_private4 masquerade",
        "ip6 saddr @s_private6 ip6 daddr != @s_private6 masquerade",
    ),
    "a_machine": (
        f"iifname != {LINKS} return",
        "iifname . ether saddr . arp saddr ether . arp saddr ip @a_source return",
        f"counter name {ARP_COUNTER} drop",
    ),
}


def policy_part(policy: PolicyWanted) -> RulePart:
    """All that does not depend on which machines are here."""
    elements: dict[str, Mapping[str, str]] = {}
    for name, cidrs in (("infrastructure", policy.infrastructure_cidrs), ("private", policy.private_cidrs)):
        for version in VERSIONS:
            ranges = addresses_of(cidrs, version)
            elements[f"s_{name}{version}"] = {range_text(addresses, version): "" for addresses in ranges}
    objects = dict.fromkeys((f"counter {name}" for name in (*COUNTERS, ARP_COUNTER)), "")
    return RulePart(chains=_CHAINS, sets=_SETS, elements=elements, objects=objects)


def set_name(firewall_id: str, kind: tuple[str, str], version: Version) -> str:
    return f"s_{kind[0][0]}{kind[1][0]}{version}_{firewall_id}"


def firewall_boxes(firewall: FirewallWanted) -> dict[tuple[str, str, Version], tuple[Box, ...]]:
    """By direction, action and family, without empty ones."""
    found: dict[tuple[str, str, Version], tuple[Box, ...]] = {}
    for kind in KINDS:
        rules = tuple(rule for rule in firewall.rules if (rule.direction, rule.action) == kind)
        for version in VERSIONS:
            if chosen := boxes(rules, version):
                found[*kind, version] = chosen
    return found


def firewall_part(firewall_id: str, found: Mapping[tuple[str, str, Version], tuple[Box, ...]]) -> RulePart:
    """Its sets, one for each direction, action and family that it has rules of."""
    sets: dict[str, SetSpec] = {}
    elements: dict[str, Mapping[str, str]] = {}
    for (direction, action, version), chosen in found.items():
        name = set_name(firewall_id, (direction, action), version)
        sets[name] = _INTERVALS[version]
        elements[name] = {box_text(box, version): "" for box in chosen}
    return RulePart(sets=sets, elements=elements)


def combination_name(firewall_ids: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(firewall_ids)).encode()).hexdigest()[:16]


def has_rules(firewalls: Iterable[FirewallWanted], kind: tuple[str, str]) -> bool:
    return any((rule.direction, rule.action) == kind for firewall in firewalls for rule in firewall.rules)


def combination_part(firewalls: Mapping[str, RulePart], *, restricts_egress: bool) -> RulePart:
    """The chains of nics with exactly these firewalls, by id: denies of all first, then allows of all.

    `restricts_egress`: one of them allows something outwards, so the rest is denied.
    """
    name = combination_name(firewalls)
    inward = [*_lookups(firewalls, ("ingress", "deny"), "counter name denied_in drop")]
    inward += [*_lookups(firewalls, ("ingress", "allow"), "return"), "counter name denied_in drop"]
    outward = [*_lookups(firewalls, ("egress", "deny"), "counter name denied_out drop")]
    if restricts_egress:
        outward += _lookups(firewalls, ("egress", "allow"), "return")
    else:  # a packet too short to have ports was in no set of denies: it does not go out by that
        outward.append("th dport >= 0 return")
    outward.append("counter name denied_out drop")
    return RulePart(chains={f"in_{name}": tuple(inward), f"out_{name}": tuple(outward)})


def nic_part(nic: NicWanted, firewall_ids: Iterable[str], *, filters_egress: bool) -> RulePart:
    """The nic's elements: what it may send as, and which chains decide about it."""
    link = f'"{interface_name(nic.id)}"'
    combination = combination_name(firewall_ids) if tuple(firewall_ids) else ""
    elements: dict[str, Mapping[str, str]] = {
        "s_hardware": {f"{link} . {nic.mac}": ""},
        "m_in": {link: f"goto in_{combination}" if combination else f"goto {CLOSED}"},
        "m_out": {link: f"goto out_{combination}" if combination and filters_egress else f"goto {OPEN}"},
    }
    if nic.ipv4:
        elements["s_source4"] = {f"{link} . {nic.mac} . {nic.ipv4}": ""}
        # 0.0.0.0: a guest asks whether its address is taken (RFC 5227); the host learns nothing from it.
        elements["a_source"] = {f"{link} . {nic.mac} . {nic.mac} . {address}": "" for address in (nic.ipv4, "0.0.0.0")}
    if nic.ipv6:
        elements["s_source6"] = {f"{link} . {nic.mac} . {nic.ipv6}": ""}
        elements["s_target6"] = {f"{link} . {int(ipaddress.IPv6Address(nic.ipv6)):#034x}": ""}
    return RulePart(elements=elements)


def revoked_key(protocol: int, near: tuple[str, int], far: tuple[str, int]) -> tuple[str, str]:
    """(set, element) that refuses a flow between these (address, port)."""
    version = 6 if ":" in near[0] else 4
    return f"s_revoked{version}", f"{near[0]} . {far[0]} . {protocol} . {near[1]} . {far[1]}"


def _lookups(firewalls: Mapping[str, RulePart], kind: tuple[str, str], verdict: str) -> list[str]:
    return [
        f"meta l4proto . th dport . {_FAR[kind[0], version]} @{set_name(firewall_id, kind, version)} {verdict}"
        for version in VERSIONS
        for firewall_id in sorted(firewalls)
        if set_name(firewall_id, kind, version) in firewalls[firewall_id].sets
    ]
