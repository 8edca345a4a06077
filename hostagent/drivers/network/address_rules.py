"""Reserved addresses in the table, and what may come in for the host's own addresses. Pure.

The one rule: an address is translated one to one where it is held, in both directions, and only on the way out of the private
networks; what is for no machine and no service is refused, never given to a program of the host.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from hostagent.drivers.network.edgeways import PORT
from hostagent.drivers.network.firewall_sets import Version, addresses_of, range_text
from hostagent.drivers.network.protocol import FieldType, RulePart, SetSpec
from hostagent.drivers.network.table import TUNNELS
from hostagent.protocol.network import AddressWanted

WAYS = "ways"
_FAMILIES: tuple[tuple[Version, str, FieldType], ...] = ((4, "ip", "ipv4_addr"), (6, "ip6", "ipv6_addr"))


def ways_part(private_cidrs: Sequence[str]) -> RulePart:
    """All that does not depend on which addresses are here. `private_cidrs`: the operator's pools."""
    sets: dict[str, SetSpec] = {}
    elements: dict[str, dict[str, str]] = {}
    to_machine, from_machine, refused = [], [], []
    for version, word, field in _FAMILIES:
        for way in ("in", "out"):
            sets[f"m_address{version}_{way}"] = SetSpec(declaration=f"type {field} : {field};", key=(field,), data=(field,))
        sets[f"s_held{version}"] = SetSpec(declaration=f"type {field};", key=(field,))
        sets[f"s_home{version}"] = SetSpec(declaration=f"type {field}; flags interval;", key=(field,))
        elements[f"s_home{version}"] = {range_text(found, version): "" for found in addresses_of(private_cidrs, version)}
        to_machine.append(f"dnat {word} to {word} daddr map @m_address{version}_in")
        from_machine.append(f"{word} daddr != @s_home{version} snat {word} to {word} saddr map @m_address{version}_out")
        refused.append(f"{word} daddr @s_held{version} ct state new meta l4proto tcp reject with tcp reset")
        echo = "icmp" if version == 4 else "ipv6-icmp"
        refused.append(f"{word} daddr @s_held{version} ct state new meta l4proto != {echo} reject")
    tunnelled = (
        f"iifname {TUNNELS} ct state established,related accept",
        f"iifname {TUNNELS} meta l4proto {{ icmp, ipv6-icmp }} accept",
        f"iifname {TUNNELS} udp dport {PORT} accept",  # whose it is was looked at where it came in
        f"iifname {TUNNELS} reject with icmpx admin-prohibited",
    )
    chains = {
        "dstnat_address": tuple(to_machine),
        "srcnat_address": tuple(from_machine),
        "input_tunnel": (*tunnelled, *refused),
    }
    return RulePart(chains=chains, sets=sets, elements=elements)


def address_part(document: AddressWanted) -> RulePart:
    """The elements of one address in the maps of `ways_part`."""
    version = str(ipaddress.ip_address(document.address).version)
    elements = {f"s_held{version}": {document.address: ""}}
    if document.private_address:
        elements[f"m_address{version}_in"] = {document.address: document.private_address}
        elements[f"m_address{version}_out"] = {document.private_address: document.address}
    return RulePart(elements=elements)
