"""Links, routes and rules in dictionaries; nothing reaches the kernel."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hostagent.drivers.fault import Faults
from hostagent.drivers.network.protocol import (
    Flow,
    FlowTraits,
    LinkObserved,
    LinkPlan,
    LinkRendered,
    LinkTraits,
    RoutePlan,
    RoutesObserved,
    RouteTraits,
    RuleChange,
    RulePlan,
    RulesObserved,
    RuleTraits,
)
from hostagent.drivers.network.reach import (
    AddressTraits,
    SpeakerTraits,
    TunnelInterfaceObserved,
    TunnelsObserved,
    TunnelTraits,
    WaysMade,
    WayTraits,
)
from hostagent.drivers.network.rival import RivalWatch
from hostagent.drivers.network.table import BASE_CHAINS, SLOTS, difference, render_table
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import BgpWanted, EdgeWaysWanted, TunnelWanted


class FakeLinks:
    traits = LinkTraits(name="fake", kinds=frozenset({"tap", "veth"}))

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.links: dict[str, LinkObserved] = {}

    def render(self, plan: LinkPlan) -> LinkRendered:
        return LinkRendered(requests=(("link_add", (("name", plan.interface), ("kind", plan.kind))),))

    async def observe(self, plan: LinkPlan) -> LinkObserved | None:
        await self.faults.reach("network.observe", plan.nic.id)
        found = self.links.get(plan.interface)
        return found if found is None or found.kind == plan.kind else None

    async def apply(self, plan: LinkPlan) -> LinkObserved:
        await self.faults.reach("network.apply", plan.nic.id)
        self.links[plan.interface] = LinkObserved(
            nic_id=plan.nic.id, interface=plan.interface, kind=plan.kind, is_complete=True, mtu_bytes=plan.nic.mtu_bytes
        )
        return self.links[plan.interface]

    async def remove(self, interface: str) -> None:
        await self.faults.reach("network.remove", interface)
        self.links.pop(interface, None)

    async def interfaces(self) -> tuple[str, ...]:
        return tuple(self.links)


class FakeRoutes:
    traits = RouteTraits(name="fake")

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.present: RoutesObserved | None = None

    def render(self, plan: RoutePlan) -> LinkRendered:
        return LinkRendered(
            requests=tuple(("route_replace", (("dst", r.destination_cidr), ("via", r.via))) for r in plan.wanted.routes)
        )

    async def observe(self) -> RoutesObserved | None:
        await self.faults.reach("routes.observe")
        return self.present

    async def apply(self, plan: RoutePlan) -> RoutesObserved:
        await self.faults.reach("routes.apply")
        self.present = RoutesObserved(
            routes=tuple(sorted(plan.wanted.routes, key=lambda r: r.destination_cidr)),
            unreachable_cidrs=plan.wanted.unreachable_cidrs,
        )
        return self.present

    async def remove(self) -> None:
        await self.faults.reach("routes.remove")
        self.present = None


class FakeWays:
    traits = WayTraits(name="fake")

    def __init__(self) -> None:
        self.present: EdgeWaysWanted | None = None

    def plan(self, wanted: EdgeWaysWanted) -> WaysMade:
        edges = {way.host_id: number for number, way in enumerate(wanted.inward, 1)}
        outward = "bxe000000" if wanted.outward else ""
        return WaysMade(outward=outward, inward={edge: f"bx{n:03}000000" for edge, n in edges.items()}, numbers=edges)

    async def differences(self, wanted: EdgeWaysWanted) -> tuple[str, ...] | None:
        return None if self.present is None else () if self.present == wanted else ("document",)

    async def apply(self, wanted: EdgeWaysWanted) -> None:
        self.present = wanted

    async def remove(self) -> None:
        self.present = None


class FakeTunnels:
    """Every peer is heard as soon as it is known, but those in `silent`. Keys are made up of `name`, slot and generation."""

    traits = TunnelTraits(name="fake")

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.name = ""
        self.present: TunnelWanted | None = None
        self.silent: set[str] = set()

    async def observe(self, wanted: TunnelWanted | None) -> TunnelsObserved | None:
        await self.faults.reach("tunnel.observe")
        if self.present is None:
            return None
        differences = () if wanted is None or wanted == self.present else ("document",)
        return TunnelsObserved(interfaces=self._interfaces(self.present), differences=differences)

    async def apply(self, wanted: TunnelWanted) -> TunnelsObserved:
        await self.faults.reach("tunnel.apply")
        self.present = wanted if wanted.interfaces else None
        return TunnelsObserved(interfaces=self._interfaces(wanted))

    async def remove(self) -> None:
        await self.faults.reach("tunnel.remove")
        self.present = None

    def _interfaces(self, wanted: TunnelWanted) -> tuple[TunnelInterfaceObserved, ...]:
        return tuple(
            TunnelInterfaceObserved(
                slot=interface.slot,
                interface=f"bw{interface.slot}00000000",
                driver="kernel",
                public_key=self.public_key(interface.slot, interface.key_generation),
                listen_port=interface.listen_port,
                heard_host_ids=tuple(
                    sorted({p.host_id for p in wanted.peers if p.slot == interface.slot and p.host_id not in self.silent})
                ),
            )
            for interface in wanted.interfaces
        )

    def public_key(self, slot: str, generation: int) -> str:
        return base64.b64encode(hashlib.sha256(f"{self.name} {slot} {generation}".encode()).digest()).decode()


class FakeRules:
    """`table` is what was written: chains to rules, sets to elements; None when there is none. `flush` is somebody else."""

    traits = RuleTraits(name="fake", is_warm=True)

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.table: RuleTable | None = None
        self.generation = 1
        self._is_disturbed = False
        self._tell: Callable[[], None] | None = None

    def render(self, plan: RulePlan) -> str:
        return render_table(plan)

    async def observe(self) -> RulesObserved | None:
        await self.faults.reach("rules.observe")
        return RulesObserved(generation=self.generation) if self.table is not None else None

    async def apply(self, plan: RulePlan) -> RulesObserved:
        await self.faults.reach("rules.apply")
        whole = difference((), plan.parts.values(), {})
        self.table = RuleTable(chains=dict.fromkeys((*BASE_CHAINS, *SLOTS), ()))
        self.table.carry_out(whole)
        return self._written()

    async def change(self, change: RuleChange) -> RulesObserved:
        await self.faults.reach("rules.change")
        if self.table is None:
            raise AgentError("rules.refused", "there is no table")
        after = self.table.copy()
        after.carry_out(change)
        self.table = after
        return self._written()

    async def read(self, words: str) -> str:
        await self.faults.reach("rules.read")
        if self.table is None:
            raise AgentError("rules.refused", f"{words}: there is no table")
        return repr(self.table)

    async def remove(self) -> None:
        await self.faults.reach("rules.remove")
        self.table = None
        self._written()

    async def disturbed(self) -> str | None:
        was, self._is_disturbed = self._is_disturbed, False
        return "flush" if was else None

    def on_news(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def counters(self) -> dict[str, int]:
        return {}

    async def close(self) -> None:
        """Nothing stays loaded."""

    def flush(self) -> None:
        self.table = None
        self.generation += 1
        self._is_disturbed = True
        if self._tell is not None:
            self._tell()

    def _written(self) -> RulesObserved:
        self.generation += 1
        return RulesObserved(generation=self.generation)


@dataclass(slots=True)
class RuleTable:
    chains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sets: dict[str, dict[str, str]] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)

    def copy(self) -> RuleTable:
        return RuleTable(dict(self.chains), {name: dict(pairs) for name, pairs in self.sets.items()}, dict(self.objects))

    def carry_out(self, change: RuleChange) -> None:
        """Raises AgentError `rules.refused` for what is not there, or is there already with another value."""
        self.objects |= change.new_objects
        self.sets |= {name: {} for name in change.new_sets}
        self.chains |= dict.fromkeys(change.new_chains, ())
        for name, rules in change.rules.items():
            self._known(self.chains, name)
            self.chains[name] = rules
        for name, pairs in change.removed.items():
            self._known(self.sets, name)
            for key in pairs:
                self._known(self.sets[name], key)
                del self.sets[name][key]
        for name, pairs in change.added.items():
            self._known(self.sets, name)
            for key, value in pairs.items():
                if value.startswith(("goto ", "jump ")):
                    self._known(self.chains, value.split()[1])
                if self.sets[name].setdefault(key, value) != value:
                    raise AgentError("rules.refused", f"{name} has another {key}")
        for table, names in (
            (self.chains, change.old_chains),
            (self.sets, change.old_sets),
            (self.objects, change.old_objects),
        ):
            for name in names:
                self._known(table, name)
                del table[name]

    @staticmethod
    def _known(table: Mapping[str, object], name: str) -> None:
        if name not in table:
            raise AgentError("rules.refused", f"there is no {name}")


class FakeFlows:
    """`present` is what a test says that there is."""

    traits = FlowTraits(name="fake")

    def __init__(self) -> None:
        self.present: list[Flow] = []

    async def count(self) -> int:
        return len(self.present)

    async def flows(
        self, *, addresses: Collection[str] | None = None, mark: int | None = None, mask: int = 0xFFFF_FFFF
    ) -> list[Flow]:
        found = [flow for flow in self.present if mark is None or flow.mark & mask == mark]
        ends = [(flow, {end.source for end in (flow.original, flow.reply)}) for flow in found]
        return [flow for flow, names in ends if addresses is None or names & set(addresses)]

    async def delete(self, flows: Iterable[Flow]) -> int:
        chosen = list(flows)
        before = len(self.present)
        self.present = [flow for flow in self.present if flow not in chosen]
        return before - len(self.present)

    async def delete_marked(self, mark: int, mask: int) -> None:
        await self.delete(await self.flows(mark=mark, mask=mask))


class FakeAddresses:
    """`told`: every announcement, in order. `elsewhere`: what other hosts on the link have."""

    traits = AddressTraits(name="fake")

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.held: set[str] = set()
        self.told: list[str] = []
        self.elsewhere: set[str] = set()
        self.rivals = RivalWatch()

    async def held_on(self, address: str) -> str:
        await self.faults.reach("address.observe", address)
        return "fake0" if address in self.held else ""

    async def apply(self, address: str, *, is_announced: bool) -> str:
        await self.faults.reach("address.apply", address)
        self.held.add(address)
        self.told += [address] if is_announced else []
        return "fake0"

    async def guard(self, address: str) -> None:
        del address  # rivals speak by `rivals.on_rival`

    async def is_answered(self, address: str) -> bool:
        return address in self.elsewhere

    async def defend(self, address: str) -> None:
        self.told.append(address)

    async def remove(self, address: str) -> None:
        await self.faults.reach("address.remove", address)
        self.held.discard(address)


class FakeSpeaker:
    traits = SpeakerTraits(name="fake")

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.routers: BgpWanted | None = None

    async def is_up(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> bool:
        return tuple(addresses) == self.addresses and routers == self.routers

    async def apply(self, addresses: Sequence[str], routers: BgpWanted | None = None) -> None:
        self.addresses, self.routers = tuple(addresses), routers
