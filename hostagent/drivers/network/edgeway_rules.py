"""Edge ways in the table. Pure.

The one rule: only an edge's own packets come by its way, they reach only what it balances here, and what answers them goes back
by the same way: a flow remembers its edge as a mark.
"""

from __future__ import annotations

from hostagent.drivers.network.edgeways import PORT, mark_of
from hostagent.drivers.network.protocol import RulePart, SetSpec
from hostagent.drivers.network.reach import WaysMade
from hostagent.drivers.network.table import MARK_EDGE_MASK, TUNNELS, WAY_LINKS
from hostagent.protocol.network import EdgeWaysWanted

PART = "edgeways"
_NETWORK = "@th,96,24"  # of a VXLAN's packet, after the UDP header and the flags (RFC 7348)


def edgeways_part(wanted: EdgeWaysWanted, made: WaysMade) -> RulePart:
    senders = [
        f"iifname {TUNNELS} ip saddr {way.address} {_NETWORK} {way.network:#x} return"
        for way in sorted(wanted.inward, key=lambda way: way.host_id)
    ]
    if made.outward:
        senders.append(f"iifname {TUNNELS} ip saddr @s_way_ends {_NETWORK} {wanted.network:#x} return")
    answers = f"ct direction reply ct mark & {MARK_EDGE_MASK:#x} != 0 meta mark set ct mark & {MARK_EDGE_MASK:#x}"
    chains: dict[str, tuple[str, ...]] = {
        "mangle_tunnel": (
            f"udp dport {PORT} fib daddr type local jump way_senders",
            f"iifname {WAY_LINKS} ct state new ct mark set iifname map @m_ways",
            f"iifname != {WAY_LINKS} {answers}",
        ),
        "way_senders": (*senders, "drop"),
        # The packet around it would inherit the mark, and be sent into the way again.
        "post_tunnel": (f"oifname {WAY_LINKS} meta mark set meta mark & {0xFFFF_FFFF ^ MARK_EDGE_MASK:#x}",),
        "mark_tunnel": (answers,),  # what this host itself has to say to the client: too big, unreachable
        "forward_tunnel": (
            f"iifname != {WAY_LINKS} return",
            "ip daddr . meta l4proto . th dport @s_way_accepts4 accept",
            "ip6 daddr . meta l4proto . th dport @s_way_accepts6 accept",
            "drop",
        ),
    }
    elements: dict[str, dict[str, str]] = {
        "m_ways": {f'"{name}"': str(mark_of(made.numbers[edge])) for edge, name in made.inward.items()},
        "s_way_ends": {way.address: "" for way in wanted.outward},
    }
    for way in wanted.inward:
        for address, protocol, port in way.accepts:
            elements.setdefault(f"s_way_accepts{6 if ':' in address else 4}", {})[f"{address} . {protocol} . {port}"] = ""
    return RulePart(chains=chains, sets=_SETS, elements={name: found for name, found in elements.items() if found})


_SETS = {
    "m_ways": SetSpec(declaration="type ifname : mark;", key=("ifname",), data=("mark",)),
    "s_way_ends": SetSpec(declaration="type ipv4_addr;", key=("ipv4_addr",)),
    "s_way_accepts4": SetSpec(
        declaration="type ipv4_addr . inet_proto . inet_service;", key=("ipv4_addr", "inet_proto", "inet_service")
    ),
    "s_way_accepts6": SetSpec(
        declaration="type ipv6_addr . inet_proto . inet_service;", key=("ipv6_addr", "inet_proto", "inet_service")
    ),
}
