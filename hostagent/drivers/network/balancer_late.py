"""Flows that were idle for longer than their service's time-out, when their backend speaks first: pure.

The one rule: conntrack forgets such a flow, and this remembers the little that is needed to go on with it: who the client is
and where it believes to be connected. A client that only waits for an answer gets it, whenever that comes. What is remembered
is forgotten when the flow is closed, or after REMEMBERED_SECONDS.

The flow that a late packet begins is reversed: its first packet comes from the backend. Its mark says so.

IPv4 alone: nft 1.0.6, of Debian 12, ends itself over rules that fill a map by a key of more than 16 bytes. A backend that
speaks first over IPv6 is reset at once, and its client hears of it with its own next packet.
"""

from __future__ import annotations

from hostagent.drivers.network.balancer_rules import NOT_OFFLOADED, Family
from hostagent.drivers.network.protocol import FieldType, RulePart, SetSpec
from hostagent.drivers.network.table import MARK_REVERSED

REMEMBERED_SECONDS = 3600
IDLE_SECONDS = 60
MOST = 65_535
ONE_IN = 32  # packets of a backend at which its flow's memory is kept young
FAMILIES: tuple[Family, ...] = (4,)
_IP = {4: "ip", 6: "ip6"}
_FORWARDS = 0xFFFF_FFFF ^ MARK_REVERSED


def late_part() -> RulePart:
    """For services whose flows carry NOT_OFFLOADED: with an idle time-out under a minute. Others' packets pay one test."""
    chains: dict[str, tuple[str, ...]] = {
        "late_balancer": (
            f"ct mark & {NOT_OFFLOADED:#x} == 0 return",
            f"ct mark & {MARK_REVERSED:#x} != 0 goto lb_reversed",
            "tcp flags & (fin | rst) != 0 goto lb_forget",
            "ct direction reply tcp flags & (syn | ack) == syn | ack goto lb_remember",
            f"ct direction reply meta l4proto tcp numgen random mod {ONE_IN} 0 goto lb_remember",
        ),
        "lb_reversed": (
            "tcp flags & (fin | rst) != 0 jump lb_forget_reversed",
            f"ct direction original ct mark & {_FORWARDS:#x} @lb_out return",
            f"ct mark & {_FORWARDS:#x} @lb_in",
        ),
        "dstnat_late": ("tcp flags & (syn | rst | fin) == 0 jump lb_late",),
        "forward_late": (f"ct mark & {MARK_REVERSED:#x} != 0 accept",),
    }
    packets = {family: f"{_IP[family]} saddr . tcp sport . {_IP[family]} daddr . tcp dport" for family in FAMILIES}
    chains["lb_late"] = (
        *(f"ct mark set {packet} map @lb_late_mark{family}" for family, packet in packets.items()),
        f"ct mark & {NOT_OFFLOADED:#x} == 0 return",
        f"ct mark set ct mark | {MARK_REVERSED:#x}",
        *(f'meta nfproto ipv{family} ct timeout set "lb_late{family}"' for family in FAMILIES),
        *(
            f"meta l4proto tcp dnat {_IP[family]} to {packet} map @lb_late_client{family} : {packet} map @lb_late_port{family}"
            for family, packet in packets.items()
        ),
    )
    chains["srcnat_late"] = tuple(_source(family) for family in FAMILIES)
    objects = {f"ct timeout lb_late{family}": _timeout(family) for family in FAMILIES}
    sets = {name: spec for family in FAMILIES for name, (spec, _) in _maps(family).items()}
    return RulePart(chains=chains | _memory(), sets=sets, objects=objects)


def _memory() -> dict[str, tuple[str, ...]]:
    """The chains that fill the maps and empty them: by a flow's reply, or, where that is reversed, by its original."""

    def change(word: str, direction: str) -> tuple[str, ...]:
        return tuple(
            f"meta l4proto tcp {word} @{name} {{ {_key(family, direction)} : {value} }}"
            for family in FAMILIES
            for name, (_, value) in _maps(family).items()
        )

    return {
        "lb_remember": change("update", "ct reply"),
        "lb_forget": change("delete", "ct reply"),
        "lb_forget_reversed": change("delete", "ct original"),
    }


def _key(family: Family, direction: str) -> str:
    ip = _IP[family]
    return f"{direction} {ip} saddr . {direction} proto-src . {direction} {ip} daddr . {direction} proto-dst"


def _maps(family: Family) -> dict[str, tuple[SetSpec, str]]:
    """By name what they hold, by a packet of the backend: nft 1.0.6 ends itself over one that would hold address and port."""
    address: FieldType = "ipv4_addr" if family == 4 else "ipv6_addr"
    key: tuple[FieldType, ...] = (address, "inet_service", address, "inet_service")

    def spec(data: FieldType) -> SetSpec:
        flags = f"flags dynamic,timeout; timeout {REMEMBERED_SECONDS}s; size {MOST};"
        return SetSpec(declaration=f"type {' . '.join(key)} : {data}; {flags}", key=key, data=(data,))

    ip = _IP[family]
    return {
        f"lb_late_mark{family}": (spec("mark"), "ct mark"),
        f"lb_late_client{family}": (spec(address), f"ct original {ip} saddr"),
        f"lb_late_port{family}": (spec("inet_service"), "ct original proto-src"),
        f"lb_late_vip{family}": (spec(address), f"ct original {ip} daddr"),
        f"lb_late_listener{family}": (spec("inet_service"), "ct original proto-dst"),
    }


def _source(family: Family) -> str:
    original = _key(family, "ct original")
    to = f"{original} map @lb_late_vip{family} : {original} map @lb_late_listener{family}"
    return f"ct mark & {MARK_REVERSED:#x} != 0 meta l4proto tcp snat {_IP[family]} to {to}"


def _timeout(family: Family) -> str:
    return f"protocol tcp; l3proto {_IP[family]}; policy = {{ established : {IDLE_SECONDS}, close_wait : {IDLE_SECONDS} }};"
