"""Load balancers as parts of the table: pure, from what is wanted and known to rules and elements.

The one rule: a service is elements, not rules. The first packet of a flow finds its chain (limits and time-outs, then the
choice of a bucket; or refusal), its bucket's mark and its backend, one hash lookup each; it alone meets them, as only first
packets pass chains of type nat. Every later packet costs one counter. The flow's mark names port and backend: counters, the
source address and the end of a backend's flows go by it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hostagent.drivers.network.balancer_buckets import BUCKETS, SEED, Table, moved
from hostagent.drivers.network.protocol import MadeElements, RuleChange, RulePart, SetSpec
from hostagent.drivers.network.table import MARK_BACKEND_MASK, MARK_EDGE_SHIFT, MARK_OWN_WAY, MARK_REVERSED, WAY_LINKS
from hostagent.protocol.network import BackendWanted, LoadBalancerWanted

Family = int  # 4 or 6
FAMILIES: tuple[Family, ...] = (4, 6)
COUNTERS = ("lb_flows", "lb_in", "lb_out", "lb_accepted", "lb_refused", "lb_resets")
NOT_OFFLOADED = 0x0100_0000  # class bit of the mark: this flow stays out of the flowtable
SHORTEST_OFFLOADED_SECONDS = 60  # a flowtable forgets after 30 s of its own; shorter time-outs would not hold in it
OFFLOADED = 0x0200_0000  # class bit of the flow: it has been in the flowtable, its conntrack entry counts what it carries
PASSED = ("lb_flows", "lb_in", "lb_out")  # what every flow or packet is looked up in
_SIZE = f" size {MARK_BACKEND_MASK + 1};"  # a set of known size is a plain hash table: half as dear to look into, 1 MiB each
KEPT, NAMED, MASQUERADED = "lb_kept", "lb_named", "lb_masquerade"  # the source address of a backend's flows
OFFLOADED_FROM_BYTES = 256 << 10  # a flow that has carried so much is long; shorter ones would pay for the entry and not use it
FLOWTABLE = "lb_flowtable"
SHARED_ALGORITHMS = ("source", "source_port", "random")
_TUPLE = {4: "ip daddr . meta l4proto . th dport", 6: "ip6 daddr . meta l4proto . th dport"}
_SADDR = {4: "ip saddr", 6: "ip6 saddr"}
_IP = {4: "ip", 6: "ip6"}
Marks = Mapping[tuple[int, str], int]
"""The mark by (target port of the listener, backend's id)."""


def family_of(address: str) -> Family:
    return ipaddress.ip_address(address).version


def address_of(backend: BackendWanted, family: Family) -> str:
    return backend.ipv4 if family == 4 else backend.ipv6


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What happens to a service's new flows before a backend is chosen. All 0: nothing."""

    rate: int = 0
    connections: int = 0
    tcp_seconds: int = 0
    udp_seconds: int = 0

    @property
    def name(self) -> str:
        """Of the part that holds what all services with this guard share."""
        return f"lb_g_{self.rate}_{self.connections}_{self.tcp_seconds}_{self.udp_seconds}"


NO_GUARD = Guard()


def guard_of(wanted: LoadBalancerWanted) -> Guard:
    return Guard(
        rate=wanted.new_connections_per_second_per_source,
        connections=wanted.connections_per_source,
        tcp_seconds=wanted.established_timeout_seconds,
        udp_seconds=wanted.udp_timeout_seconds,
    )


def class_of(wanted: LoadBalancerWanted) -> int:
    """The class bits of this service's marks."""
    shortest = min(filter(None, (wanted.established_timeout_seconds, wanted.udp_timeout_seconds)), default=0)
    return NOT_OFFLOADED if 0 < shortest < SHORTEST_OFFLOADED_SECONDS else 0


class BucketElements(MadeElements):
    """251 elements of the bucket map, made as they are asked for: a thousand services would fill 60 MB as text."""

    __slots__ = ("_marks", "_owners", "_prefix")

    def __init__(self, prefix: str, owners: Table, marks: Mapping[str, str]) -> None:
        self._prefix = prefix
        self._owners = owners
        self._marks = marks

    @property
    def claims(self) -> Collection[str]:
        return {self._prefix}

    def __getitem__(self, key: str) -> str:
        prefix, _, bucket = key.rpartition(" . ")
        if prefix != self._prefix or not self._owners[int(bucket)]:
            raise KeyError(key)
        return self._marks[self._owners[int(bucket)]]

    def __iter__(self) -> Iterator[str]:
        return (f"{self._prefix} . {bucket}" for bucket, owner in enumerate(self._owners) if owner)

    def __len__(self) -> int:
        return sum(1 for owner in self._owners if owner)


class JoinedElements(MadeElements):
    """Several listeners' buckets as one mapping."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Mapping[str, BucketElements]) -> None:
        self._parts = parts

    @property
    def claims(self) -> Collection[str]:
        return self._parts.keys()

    def __getitem__(self, key: str) -> str:
        return self._parts[key.rpartition(" . ")[0]][key]

    def __iter__(self) -> Iterator[str]:
        return (key for part in self._parts.values() for key in part)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())


def shared_part(*, offloads: bool = False) -> RulePart:
    """The slots, and the maps that all services fill. `offloads`: flows may be in a flowtable here."""
    chains: dict[str, tuple[str, ...]] = {
        "dstnat_balancer": tuple(f"{_TUPLE[family]} vmap @lb_services{family}" for family in FAMILIES),
        "forward_balancer": (
            "ct direction original ct mark @lb_in return",
            "ct mark @lb_out tcp flags & (syn | rst) != 0 jump lb_answers",
            *((f"ct mark & {OFFLOADED:#x} != 0 goto lb_long",) if offloads else ()),
        ),
        "lb_answers": (
            "tcp flags & (syn | ack) == syn | ack ct mark @lb_accepted return",
            "tcp flags & rst == rst tcp sequence 0 ct mark @lb_refused return",
            "tcp flags & rst == rst ct mark @lb_resets",
        ),
        "lb_long": (f"ct direction reply tcp flags & rst == rst ct mark & {0xFFFF_FFFF ^ OFFLOADED:#x} @lb_resets",),
        "srcnat_balancer": ("ct mark != 0 ct mark vmap @lb_leaving",),
        KEPT: tuple(f"ct mark . {_SADDR[family]} @lb_hairpins{family} masquerade" for family in FAMILIES),
        NAMED: (
            *(f"meta l4proto {{ tcp, udp }} snat {_IP[family]} to ct mark map @lb_sources{family}" for family in FAMILIES),
            "masquerade",
        ),
        MASQUERADED: ("masquerade",),
        "input_balancer": tuple(
            f"{_IP[family]} daddr @lb_vips{family} ct direction original meta l4proto {{ tcp, udp }} goto lb_reject"
            for family in FAMILIES
        ),
        "lb_reject": ("meta l4proto tcp reject with tcp reset", "reject with icmpx type port-unreachable"),
    }
    sets = {
        name: SetSpec(declaration=f"type mark;{_SIZE if name in PASSED else ''} counter;", key=("mark",)) for name in COUNTERS
    }
    sets["lb_leaving"] = SetSpec(declaration="type mark : verdict;", key=("mark",), data=("verdict",))
    for family in FAMILIES:
        sets |= _sets(family)
    return RulePart(chains=chains, sets=sets)


def offload_part(uplinks: tuple[str, ...]) -> RulePart:
    """Long flows between these links go by a flowtable: established, thus let in, by nothing that a tunnel or a machine is on.

    What is offloaded meets no rule any more: it is counted by its conntrack entry and ends with it.
    """
    quoted = [f'"{name}"' for name in uplinks]
    between = "iifname @lb_uplinks oifname @lb_uplinks meta l4proto { tcp, udp }"
    rules = (
        f"ct mark & {MARK_BACKEND_MASK:#x} == 0 return",
        f"ct mark & {NOT_OFFLOADED:#x} != 0 return",
        f"{between} ct bytes > {OFFLOADED_FROM_BYTES} ct mark set ct mark | {OFFLOADED:#x} flow add @{FLOWTABLE}",
    )
    return RulePart(
        chains={"forward_offload": rules},
        sets={"lb_uplinks": SetSpec(declaration="type ifname;", key=("ifname",))},
        elements={"lb_uplinks": dict.fromkeys(quoted, "")},
        objects={f"flowtable {FLOWTABLE}": f"hook ingress priority 0; devices = {{ {', '.join(quoted)} }}; counter;"},
    )


def ways_part() -> RulePart:
    """Flows of backends whose replies come back by an edge way, `lb_ways` by mark, go by it with their clients' addresses.

    What this host itself sends to its own balancer has chosen its way before it is translated: it is masqueraded.
    """
    there = f"meta mark set {MARK_OWN_WAY << MARK_EDGE_SHIFT:#x}"
    forwards = f"ct mark & {0xFFFF_FFFF ^ MARK_REVERSED:#x}"
    return RulePart(
        chains={
            "way_balancer": (
                f"ct direction original ct mark @lb_ways {there} return",
                f"ct direction reply ct mark & {MARK_REVERSED:#x} != 0 {forwards} @lb_ways {there}",
            ),
            "srcnat_way": (f"oifname != {WAY_LINKS} ct mark @lb_ways masquerade",),
        },
        sets={"lb_ways": SetSpec(declaration="type mark;", key=("mark",))},
    )


def has_ways(wanted: LoadBalancerWanted) -> bool:
    return wanted.client_address == "kept" and any(b.reply == "way" for b in wanted.backends if b.state != "removed")


def _sets(family: Family) -> dict[str, SetSpec]:
    address = f"ipv{family}_addr"
    service = (address, "inet_proto", "inet_service")
    named = f"type {' . '.join(service)}"
    buckets = f"typeof {_TUPLE[family]} . numgen inc mod {BUCKETS} : ct mark;"
    return {
        f"lb_services{family}": SetSpec(declaration=f"{named} : verdict;", key=service, data=("verdict",)),  # pyright: ignore[reportArgumentType]
        f"lb_buckets{family}": SetSpec(declaration=buckets, key=(*service, "number"), data=("mark",)),  # pyright: ignore[reportArgumentType]
        f"lb_backends{family}": SetSpec(
            declaration=f"type mark : {address} . inet_service;{_SIZE}", key=("mark",), data=(address, "inet_service")  # pyright: ignore[reportArgumentType]
        ),
        f"lb_sources{family}": SetSpec(declaration=f"type mark : {address};", key=("mark",), data=(address,)),  # pyright: ignore[reportArgumentType]
        f"lb_hairpins{family}": SetSpec(declaration=f"type mark . {address};", key=("mark", address)),  # pyright: ignore[reportArgumentType]
        f"lb_vips{family}": SetSpec(declaration=f"type {address};", key=(address,)),  # pyright: ignore[reportArgumentType]
    }  # fmt: skip


_SPECS = {name: spec for family in FAMILIES for name, spec in _sets(family).items()}


def _choice(algorithm: str, family: Family) -> str:
    source, buckets = _SADDR[family], f"mod {BUCKETS} seed {SEED:#x}"
    return {
        "source": f"jhash {source} {buckets}",
        "source_port": f"jhash {source} . th sport {buckets}",
        "random": f"numgen random mod {BUCKETS}",
        "round_robin": f"numgen inc mod {BUCKETS}",
    }[algorithm]


def service_rules(guard: Guard, algorithm: str, family: Family) -> tuple[str, ...]:
    """All that the first packet of a flow meets: its limits, then from the choice of a bucket to the translated destination."""
    target = f"dnat {_IP[family]} to ct mark map @lb_backends{family}"
    return (
        *_guard_rules(guard, family),
        f"ct mark set {_TUPLE[family]} . {_choice(algorithm, family)} map @lb_buckets{family}",
        f"meta l4proto tcp ct mark @lb_flows {target}",
        f"meta l4proto udp ct mark @lb_flows {target}",
    )


def _guard_rules(guard: Guard, family: Family) -> Iterator[str]:
    source = f"{_SADDR[family]} . {_TUPLE[family]}"
    if guard.rate:
        over = f"limit rate over {guard.rate}/second burst {2 * guard.rate} packets"
        yield f"update @{_named('rate', guard, family)} {{ {source} {over} }} drop"
    if guard.connections:
        yield f"add @{_named('conn', guard, family)} {{ {source} ct count over {guard.connections} }} goto lb_reject"
    for protocol, seconds in (("tcp", guard.tcp_seconds), ("udp", guard.udp_seconds)):
        if seconds:
            yield f'meta l4proto {protocol} ct timeout set "{_timeout_name(guard, protocol, seconds, family)}"'


def _named(kind: str, guard: Guard, family: Family) -> str:
    return f"lb_{kind}_{guard.name[5:]}_{family}"


def _timeout_name(guard: Guard, protocol: str, seconds: int, family: Family) -> str:
    return f"lb_t{seconds}_{guard.name[5:]}_{protocol}{family}"


def guard_part(guard: Guard) -> RulePart:
    """The sets and time-out objects of one guard, and a chain for each algorithm behind it; shared by all services alike."""
    sets: dict[str, SetSpec] = {}
    objects: dict[str, str] = {}
    for family in FAMILIES:
        address = f"ipv{family}_addr"
        key = (address, address, "inet_proto", "inet_service")
        for kind, limit, more in (
            ("rate", guard.rate, "flags dynamic,timeout; timeout 1m; size 65535;"),
            ("conn", guard.connections, "flags dynamic; size 65535;"),
        ):
            if limit:
                declaration = f"type {' . '.join(key)}; {more}"
                sets[_named(kind, guard, family)] = SetSpec(declaration=declaration, key=key)  # pyright: ignore[reportArgumentType]
        for protocol, seconds in (("tcp", guard.tcp_seconds), ("udp", guard.udp_seconds)):
            if seconds:
                objects[f"ct timeout {_timeout_name(guard, protocol, seconds, family)}"] = _timeout(family, protocol, seconds)
    chains = {
        _chain(guard, algorithm, family): service_rules(guard, algorithm, family)
        for algorithm in SHARED_ALGORITHMS
        for family in FAMILIES
    }
    return RulePart(chains=chains, sets=sets, objects=objects)


def _chain(guard: Guard, algorithm: str, family: Family) -> str:
    return f"{guard.name}_{algorithm}{family}"


def _timeout(family: Family, protocol: str, seconds: int) -> str:
    if protocol == "udp":
        policy = f"unreplied : {seconds}, replied : {seconds}"
    else:
        policy = f"established : {seconds}, close_wait : {min(seconds, 60)}"
    return f"protocol {protocol}; l3proto {_IP[family]}; policy = {{ {policy} }};"


def service_part(wanted: LoadBalancerWanted, marks: Marks, tables: Mapping[Family, Table]) -> RulePart:
    """`tables`: the owner of each bucket by address family; a family without any owner is refused at once."""
    elements: dict[str, dict[str, str]] = {}
    buckets: dict[str, dict[str, BucketElements]] = {}
    chains: dict[str, tuple[str, ...]] = {}
    guard = guard_of(wanted)
    for vip in wanted.vips:
        family = family_of(vip)
        elements.setdefault(f"lb_vips{family}", {})[vip] = ""
        services = elements.setdefault(f"lb_services{family}", {})
        for listener in wanted.listeners:
            key = f"{vip} . {listener.protocol} . {listener.port}"
            if not any(tables[family]):
                services[key] = "goto lb_reject"
                continue
            services[key] = f"goto {_chain_of(wanted, guard, family, chains)}"
            by_owner = {owner: str(marks[listener.target_port, owner]) for owner in set(tables[family]) if owner}
            buckets.setdefault(f"lb_buckets{family}", {})[key] = BucketElements(key, tables[family], by_owner)
    _add_backends(wanted, marks, elements)
    joined = {name: JoinedElements(parts) for name, parts in buckets.items()}
    return RulePart(chains=chains, elements={name: found for name, found in {**elements, **joined}.items() if found})


def bucket_change(
    wanted: LoadBalancerWanted, marks: Marks, before: Mapping[Family, Table], after: Mapping[Family, Table]
) -> RuleChange | None:
    """The elements of the buckets whose owner differs; None where more than that changes (nobody is left, or was there)."""
    removed: dict[str, dict[str, str]] = {}
    added: dict[str, dict[str, str]] = {}
    for vip in wanted.vips:
        family = family_of(vip)
        buckets = moved(before[family], after[family])
        if not buckets:
            continue
        if not (before[family][0] and after[family][0]):
            return None
        name = f"lb_buckets{family}"
        old, new = removed.setdefault(name, {}), added.setdefault(name, {})
        for listener in wanted.listeners:
            prefix = f"{vip} . {listener.protocol} . {listener.port} . "
            for bucket in buckets:
                old[f"{prefix}{bucket}"] = str(marks[listener.target_port, before[family][bucket]])
                new[f"{prefix}{bucket}"] = str(marks[listener.target_port, after[family][bucket]])
    return RuleChange(removed=removed, added=added, specs=_SPECS)


def _chain_of(wanted: LoadBalancerWanted, guard: Guard, family: Family, chains: dict[str, tuple[str, ...]]) -> str:
    if wanted.algorithm == "round_robin":  # a counter of its own: sharing one would tie services to each other's rhythm
        name = f"lb_r{family}_{wanted.id[-12:]}"
        chains[name] = service_rules(guard, wanted.algorithm, family)
        return name
    hashed = "source" if wanted.hash_on == "source" else "source_port"
    return _chain(guard, "random" if wanted.algorithm == "random" else hashed, family)


def _add_backends(wanted: LoadBalancerWanted, marks: Marks, elements: dict[str, dict[str, str]]) -> None:
    """What goes by the mark. Also of backends that are away: their flows may still be there."""
    families = {family_of(vip) for vip in wanted.vips}
    sources = {4: wanted.source_ipv4, 6: wanted.source_ipv6}
    counted: dict[str, str] = {}
    leaving: dict[str, str] = {}
    named = f"goto {NAMED if any(sources.values()) else MASQUERADED}"
    for port in sorted({listener.target_port for listener in wanted.listeners}):
        for backend in wanted.backends:
            if backend.state == "removed":
                continue
            mark = str(marks[port, backend.id])
            counted[mark] = ""
            is_kept = wanted.client_address == "kept" and backend.reply != "masqueraded"
            leaving[mark] = f"goto {KEPT}" if is_kept else named
            for family in families:
                if not (address := address_of(backend, family)):
                    continue
                elements.setdefault(f"lb_backends{family}", {})[mark] = f"{address} . {port}"
                if is_kept:
                    elements.setdefault(f"lb_hairpins{family}", {})[f"{mark} . {address}"] = ""
                    if backend.reply == "way":
                        elements.setdefault("lb_ways", {})[mark] = ""
                elif sources[family]:
                    elements.setdefault(f"lb_sources{family}", {})[mark] = sources[family]
    elements["lb_leaving"] = leaving
    elements |= dict.fromkeys(COUNTERS, counted)
