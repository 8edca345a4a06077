"""Links of machines, routes to other hosts and the table of rules, behind five words each.

The one rule: an interface's name is derived from the nic's id (`interface_name`), so that what is found in the kernel is
recognised without a register. Host side of every link: MAC 02:00:00:00:00:01, 169.254.1.1/32, fe80::1/64.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hostagent.drivers.machine.protocol import NicKind
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


FieldType = Literal[
    "ifname",
    "ether_addr",
    "ipv4_addr",
    "ipv6_addr",
    "inet_proto",
    "inet_service",
    "mark",
    "number",
    "number128",
    "verdict",
    "name",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSpec:
    """A named set, or a map when `data` is not empty.

    `declaration` is the nft text between the braces (`type ifname : verdict;`, `typeof … ; flags interval;`); `key` and `data`
    say the same as field types, for drivers that talk to the kernel without nft. `number` is 32 bits in the host's order (what
    numgen and jhash give), `name` the name of a counter or limit. A name's spec never changes: another spec, another name.
    """

    declaration: str
    key: tuple[FieldType, ...]
    data: tuple[FieldType, ...] = ()


class MadeElements(Mapping[str, str]):
    """Elements that are made as they are asked for. `claims`: what no other part may claim, instead of every key."""

    __slots__ = ()

    @property
    def claims(self) -> Collection[str]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePart:
    """What one object (a firewall, a service, a nic) has in the table. Parts never share a name or an element's key.

    `chains`: rules by chain; a chain of the skeleton's slots belongs to the one part that fills it. `elements`: by set or map
    (of this part or of another one), key text to value text, "" in sets. Text is nft's own, fields are joined by ` . `, names
    of interfaces are quoted. `objects`: `counter n_x`, `ct timeout t_x`, `limit l_x` to the text between braces.
    What is named `a_…` lies in the table of the ARP family, everything else in the inet table.
    """

    chains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sets: Mapping[str, SetSpec] = field(default_factory=dict)
    elements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePlan:
    """The whole table: the skeleton and every part by its name (`firewall/fw_…`, `nic/nic_…`, `loadbalancer/lb_…`)."""

    parts: Mapping[str, RulePart]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleChange:
    """From one state of the table to the next, in one transaction: packets see the one or the other.

    `bases`: base chains that are new, or whose rules are others now. `specs` knows every set that `added` and `removed`
    elements belong to. Objects and chains are made before, and taken away after, whatever refers to them.
    """

    new_sets: Mapping[str, SetSpec] = field(default_factory=dict)
    new_objects: Mapping[str, str] = field(default_factory=dict)
    new_chains: tuple[str, ...] = ()
    rules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    removed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    added: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    old_chains: tuple[str, ...] = ()
    old_bases: tuple[str, ...] = ()
    old_sets: tuple[str, ...] = ()
    old_objects: tuple[str, ...] = ()
    specs: Mapping[str, SetSpec] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.has_structure or self.removed or self.added)

    @property
    def has_structure(self) -> bool:
        """Whether more than elements of sets and maps changes."""
        made = self.new_sets or self.new_objects or self.new_chains or self.rules or self.bases
        return bool(made or self.old_chains or self.old_bases or self.old_sets or self.old_objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTraits:
    """`is_warm`: a process stays loaded between transactions."""

    name: Literal["nft_helper", "nft", "fake"]
    is_warm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RulesObserved:
    """`generation`: the kernel's count of transactions in this network namespace, of whatever program."""

    generation: int


class RuleDriver(Protocol):
    """One table of rules. All calls raise AgentError `rules.refused` (the kernel or nft said no; nothing changed),
    `rules.timed_out`, `rules.helper_died` (retryable; whether it happened is unknown: observe), `program.missing`,
    `rules.taken` (another agent writes here).
    """

    traits: RuleTraits

    def render(self, plan: RulePlan) -> str:
        """The transaction that replaces whatever is there by this table."""
        ...

    async def observe(self) -> RulesObserved | None:
        """None = the table is not there."""
        ...

    async def apply(self, plan: RulePlan) -> RulesObserved:
        """Replace everything, counters and dynamic sets included. Idempotent."""
        ...

    async def change(self, change: RuleChange) -> RulesObserved:
        """Fails with `rules.refused` where the table is not what the change starts from: then `apply`."""
        ...

    async def read(self, words: str) -> str:
        """The output of one `list …` command."""
        ...

    async def remove(self) -> None:
        """The table is gone. Absent is success."""
        ...

    async def disturbed(self) -> str | None:
        """The name of a program that changed the table since the last call ("" when unknown), None when nobody did."""
        ...

    def on_news(self, tell: Callable[[], None]) -> None:
        """Call `tell` in the running event loop whenever somebody else changed any rule."""
        ...

    def counters(self) -> dict[str, int]:
        """Packets by named counter."""
        ...

    async def close(self) -> None:
        """End what stays loaded. The table stays."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTraits:
    name: Literal["conntrack", "fake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One direction as its packets look: `port` 0 where the protocol has none."""

    source: str
    source_port: int
    destination: str
    destination_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """`original` as its first packet arrived, `reply` as answers arrive: after NAT `reply.source` is whom it really went to.

    Packets and bytes are 0 unless the kernel counts them (net.netfilter.nf_conntrack_acct).
    """

    family: int
    protocol: int
    original: End
    reply: End
    mark: int
    status: int
    timeout_seconds: int
    packets: int
    bytes_: int
    key: bytes = field(repr=False)

    @property
    def is_offloaded(self) -> bool:
        """By software or hardware: IPS_OFFLOAD, IPS_HW_OFFLOAD."""
        return bool(self.status & (1 << 14 | 1 << 15))


class FlowDriver(Protocol):
    """The kernel's table of flows. All calls raise AgentError `flows.refused`."""

    traits: FlowTraits

    async def count(self) -> int: ...

    async def flows(
        self, *, addresses: Collection[str] | None = None, mark: int | None = None, mask: int = 0xFFFF_FFFF
    ) -> list[Flow]:
        """Those with one of these addresses at any end (None: all) and, if given, whose mark is `mark` under `mask`."""
        ...

    async def delete(self, flows: Iterable[Flow]) -> int:
        """How many were there; those that ended meanwhile are none."""
        ...

    async def delete_marked(self, mark: int, mask: int) -> None:
        """All whose mark is `mark` under `mask`, found and deleted by the kernel. Raises ValueError for a mask of 0."""
        ...
