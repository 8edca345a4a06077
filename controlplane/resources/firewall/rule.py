"""Comparing rules: pure. The one rule: a denial wins over an allowance, whatever their order."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from controlplane.models.firewall import FirewallRule


def key_of(rule: FirewallRule) -> tuple[object, ...]:
    """What makes two rules the same."""
    return rule.action, *match_of(rule)


def match_of(rule: FirewallRule) -> tuple[object, ...]:
    """Which packets a rule speaks of, whatever it says of them."""
    ports = (rule.protocol, rule.port_first or 0, rule.port_last or 0)
    return rule.direction, *ports, rule.far_end, tuple(rule.cidrs or ()), rule.network_id, rule.peer_id


def covers(wide: FirewallRule, narrow: FirewallRule) -> bool:
    """Whether every packet that `narrow` speaks of is one that `wide` speaks of. Far ends by name are equal or not."""
    if wide.direction != narrow.direction or wide.protocol not in {"any", narrow.protocol}:
        return False
    if wide.port_first and not (
        narrow.port_first and wide.port_first <= narrow.port_first <= narrow.port_last <= wide.port_last
    ):
        return False
    if wide.far_end == narrow.far_end == "cidrs":
        return all(any(_is_inside(one, other) for other in wide.cidrs) for one in narrow.cidrs)
    ends = (wide.far_end, wide.network_id, wide.peer_id), (narrow.far_end, narrow.network_id, narrow.peer_id)
    return ends[0] == ends[1]


def idle_allowance(rule: FirewallRule, others: Iterable[FirewallRule]) -> FirewallRule | None:
    """The denial among `others` under which this allowance would let nothing pass."""
    if rule.action != "allow":
        return None
    return next((other for other in others if other.action == "deny" and covers(other, rule)), None)


def _is_inside(part: str, whole: str) -> bool:
    one, other = ipaddress.ip_network(part), ipaddress.ip_network(whole)
    return one.version == other.version and int(other[0]) <= int(one[0]) and int(one[-1]) <= int(other[-1])
