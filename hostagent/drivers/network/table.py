"""The one table `inet bedplate`: which base chains it has, in which order their parts come, and how a mark's bits are shared.

The one rule: base chains and slots stand here and nowhere else. A base chain only jumps to its slots, in a fixed order; a slot
is a chain that one owner fills by a `RulePart`. What no part fills is not jumped to, and a base chain without any is not there:
every hook is paid for by every packet. Base chains accept: a new table's chains are at their hooks a moment before their rules,
and a policy of drop would drop in that moment. Sources: nft(8); Linux, net/netfilter/nf_tables_api.c.

| hook | base chain | priority | slots, in order |
|---|---|---|---|
| prerouting | c_early | raw −300 | early_machine (from machines' links) |
| prerouting | c_mangle | mangle −150 | mangle_tunnel |
| prerouting | c_dstnat | dstnat −100 | dstnat_late, dstnat_address, dstnat_balancer |
| prerouting | c_way | −90 | way_balancer |
| output | c_mark (type route) | mangle −150 | mark_tunnel |
| output | c_output_nat | −100 | dstnat_address, dstnat_balancer |
| input | c_input | filter 0 | input_balancer, input_tunnel, input_machine |
| forward | c_forward | filter 0 | forward_balancer, …_late, …_offload, …_mtu, …_tunnel, …_machine |
| forward | c_late | 10 | late_balancer |
| output | c_output | filter 0 | output_balancer |
| postrouting | c_post_mangle | mangle −150 | post_tunnel |
| postrouting | c_srcnat | srcnat 100 | srcnat_late, srcnat_address, srcnat_way, srcnat_balancer, srcnat_machine |
| input (arp) | a_input | filter 0 | a_machine |

Packets of established flows go to forward_offload and are accepted there: at once when both ends have spoken (assured), else
after their segment size was looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from hostagent.drivers.network.protocol import MadeElements, RuleChange, RulePart, RulePlan, SetSpec

TABLE = "bedplate"
ELEMENTS_A_LINE = 5_000
LINKS = '"bp*"'  # every link of a machine; no other interface of ours may begin so
TUNNELS = '"bw*"'  # every WireGuard interface of ours
WAY_LINKS = '"bx*"'  # every way between an edge and a host of backends

# The packet's and the flow's mark: who uses which bits.
MARK_BACKEND_SHIFT, MARK_BACKEND_MASK = 0, 0x0000_FFFF
MARK_EDGE_SHIFT, MARK_EDGE_MASK = 16, 0x00FF_0000
MARK_CLASS_SHIFT, MARK_CLASS_MASK = 24, 0x0F00_0000
MARK_FREE_MASK = 0xF000_0000
MARK_REVERSED = 0x0400_0000  # class bit: this flow was begun by a backend that spoke after its own had been forgotten
MARK_OWN_WAY = 255  # among the numbers of edges: what this host, itself an edge, sends by its ways


class Step(NamedTuple):
    """What a base chain does where `slot` is filled: by default it jumps there. `instead`: where it is not."""

    slot: str
    words: str = ""
    instead: str = ""

    def rule(self, filled: Collection[str]) -> str:
        return self.words or f"jump {self.slot}" if self.slot in filled else self.instead


_ASSURED, _KNOWN = "ct status assured", "ct state established,related"
# Base chain -> (type, hook, priority, its steps).
BASE_CHAINS: dict[str, tuple[str, str, str, tuple[Step, ...]]] = {
    "c_early": ("filter", "prerouting", "raw", (Step("early_machine", f"iifname {LINKS} jump early_machine"),)),
    "c_mangle": ("filter", "prerouting", "mangle", (Step("mangle_tunnel"),)),
    "c_dstnat": ("nat", "prerouting", "dstnat", (Step("dstnat_late"), Step("dstnat_address"), Step("dstnat_balancer"))),
    "c_way": ("filter", "prerouting", "-90", (Step("way_balancer"),)),
    "c_mark": ("route", "output", "mangle", (Step("mark_tunnel"),)),
    "c_output_nat": ("nat", "output", "-100", (Step("dstnat_address"), Step("dstnat_balancer"))),
    "c_input": ("filter", "input", "filter", (Step("input_balancer"), Step("input_tunnel"), Step("input_machine"))),
    "c_forward": (
        "filter",
        "forward",
        "filter",
        (
            Step("forward_balancer", "ct mark != 0 jump forward_balancer"),
            Step("forward_late"),
            Step("forward_offload", f"{_ASSURED} goto forward_offload", f"{_ASSURED} accept"),
            Step("forward_mtu"),
            Step("forward_offload", f"{_KNOWN} goto forward_offload", f"{_KNOWN} accept"),
            Step("forward_tunnel"),
            Step("forward_machine"),
        ),
    ),
    "c_late": ("filter", "forward", "10", (Step("late_balancer"),)),
    "c_output": ("filter", "output", "filter", (Step("output_balancer"),)),
    "c_post_mangle": ("filter", "postrouting", "mangle", (Step("post_tunnel"),)),
    "c_srcnat": (
        "nat",
        "postrouting",
        "srcnat",
        (Step("srcnat_late"), Step("srcnat_address"), Step("srcnat_way"), Step("srcnat_balancer"), Step("srcnat_machine")),
    ),
    "a_input": ("filter", "input", "filter", (Step("a_machine"),)),
}
SLOTS = tuple(dict.fromkeys(step.slot for *_, steps in BASE_CHAINS.values() for step in steps))


def filled_slots(parts: Iterable[RulePart]) -> set[str]:
    return {name for part in parts for name, rules in part.chains.items() if rules and name in SLOTS}


def base_rules(filled: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The rules of each base chain that is needed for these slots."""
    return {
        name: tuple(rule for step in steps if (rule := step.rule(filled)))
        for name, (*_, steps) in BASE_CHAINS.items()
        if any(step.slot in filled for step in steps)
    }


def family_of(name: str) -> str:
    return "arp" if name.startswith("a_") else "inet"


def render_table(plan: RulePlan) -> str:
    """The transaction that replaces both tables by the skeleton and all parts. Parts in the order of their names."""
    return "".join(table_lines(plan))


def table_lines(plan: RulePlan) -> Iterator[str]:
    """The same, made as it is read: of a thousand load balancers it is 25 MB, which an agent should never hold."""
    parts = [plan.parts[name] for name in sorted(plan.parts)]
    for line in (*_skeleton(), *_lines(_structure(parts)), *_base_lines(base_rules(filled_slots(parts)))):
        yield f"{line}\n"
    for name in dict.fromkeys(name for part in parts for name in part.elements):
        pairs = _pairs(name, [part.elements[name] for part in parts if name in part.elements])
        while some := list(itertools.islice(pairs, ELEMENTS_A_LINE)):
            yield f"{_add_elements(name, some)}\n"


def _pairs(name: str, mappings: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    claimed: set[str] = set()
    for pairs in mappings:
        claims = pairs.claims if isinstance(pairs, MadeElements) else pairs.keys()
        if twice := claimed.intersection(claims):
            raise ValueError(f"two parts have the element {min(twice)} of {name}")
        claimed.update(claims)
        yield from pairs.items()


def render_removal() -> str:
    return "".join(f"add table {family} {TABLE}\ndelete table {family} {TABLE}\n" for family in ("inet", "arp"))


def render_change(change: RuleChange) -> str:
    return "".join(f"{line}\n" for line in _lines(change))


def difference(
    old: Iterable[RulePart], new: Iterable[RulePart], specs: Mapping[str, SetSpec], others: Collection[str] = ()
) -> RuleChange:
    """What leads from the old parts to the new ones. Raises ValueError for a set or an object that changes under its name.

    `specs`: of the sets of all other parts. `others`: the slots that other parts fill.
    """
    old, new = tuple(old), tuple(new)
    before, after = _union(old), _union(new)
    old_bases, bases = (base_rules({*others, *filled_slots(parts)}) for parts in (old, new))
    for name, spec in after.new_sets.items():
        if before.new_sets.get(name, spec) != spec:
            raise ValueError(f"{name}: another declaration needs another name")
    for name, body in after.new_objects.items():
        if before.new_objects.get(name, body) != body:
            raise ValueError(f"{name}: another content needs another name")
    gone = {name: () for name in before.rules if name in SLOTS and name not in after.rules}
    removed, added = _elements(before.added, after.added)
    known = {**specs, **before.new_sets, **after.new_sets}
    # Elements of a set that goes go with it, but not those that hold a chain which goes before the set does.
    stays = {name for name in removed if name not in before.new_sets or name in after.new_sets or _holds(known[name])}
    return RuleChange(
        new_sets={name: spec for name, spec in after.new_sets.items() if name not in before.new_sets},
        new_objects={name: body for name, body in after.new_objects.items() if name not in before.new_objects},
        new_chains=tuple(name for name in after.rules if name not in before.rules and name not in SLOTS),
        rules={name: rules for name, rules in after.rules.items() if before.rules.get(name) != rules} | gone,
        removed={name: pairs for name, pairs in removed.items() if name in stays},
        added=added,
        old_chains=tuple(name for name in before.rules if name not in after.rules and name not in SLOTS),
        old_sets=tuple(name for name in before.new_sets if name not in after.new_sets),
        old_objects=tuple(name for name in before.new_objects if name not in after.new_objects),
        bases={name: rules for name, rules in bases.items() if old_bases.get(name) != rules},
        old_bases=tuple(name for name in old_bases if name not in bases),
        specs=known,
    )


def without_flowtables(parts: Mapping[str, RulePart]) -> dict[str, RulePart]:
    """The same table with every flow on the slow path."""
    return {name: _without_flowtables(part) for name, part in parts.items()}


def _without_flowtables(part: RulePart) -> RulePart:
    objects = {name: body for name, body in part.objects.items() if not name.startswith("flowtable ")}
    if len(objects) == len(part.objects):
        return part
    chains = {name: tuple(rule for rule in rules if " flow add " not in rule) for name, rules in part.chains.items()}
    return replace(part, objects=objects, chains=chains)


def _holds(spec: SetSpec) -> bool:
    return "verdict" in spec.data or "name" in spec.data


def _elements(
    before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """(removed, added) by set; an element with another value is in both."""
    removed: dict[str, dict[str, str]] = {}
    added: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name, {}), after.get(name, {})
        if gone := {key: value for key, value in old.items() if new.get(key) != value}:
            removed[name] = gone
        if fresh := {key: value for key, value in new.items() if old.get(key) != value}:
            added[name] = fresh
    return removed, added


def _union(parts: Iterable[RulePart]) -> RuleChange:
    """All parts as the change that makes them from nothing. Raises ValueError where two parts claim the same."""
    parts = list(parts)
    elements: dict[str, dict[str, str]] = {}
    for part in parts:
        for name, pairs in part.elements.items():
            present = elements.setdefault(name, {})
            if twice := present.keys() & pairs.keys():
                raise ValueError(f"two parts have the element {min(twice)} of {name}")
            present.update(pairs)
    return replace(_structure(parts), added={name: pairs for name, pairs in elements.items() if pairs})


def _structure(parts: Iterable[RulePart]) -> RuleChange:
    """The same without elements."""
    sets: dict[str, SetSpec] = {}
    objects: dict[str, str] = {}
    rules: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for kind, have, more in (("set", sets, part.sets), ("object", objects, part.objects), ("chain", rules, part.chains)):
            if twice := have.keys() & more.keys():
                raise ValueError(f"two parts have the {kind} {min(twice)}")
            have.update(more)  # type: ignore[arg-type]
    chains = tuple(name for name in rules if name not in SLOTS)
    return RuleChange(new_sets=sets, new_objects=objects, new_chains=chains, rules=rules)


def _skeleton() -> Iterator[str]:
    yield from render_removal().splitlines()
    for family in ("inet", "arp"):
        yield f"add table {family} {TABLE}"
    for name in SLOTS:
        yield f"add chain {_at(name)}"


def _base_lines(bases: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name, rules in bases.items():
        kind, hook, priority, _ = BASE_CHAINS[name]
        yield f"add chain {_at(name)} {{ type {kind} hook {hook} priority {priority}; policy accept; }}"
        yield f"flush chain {_at(name)}"
        for rule in rules:
            yield f"add rule {_at(name)} {rule}"


def _lines(change: RuleChange) -> Iterator[str]:
    for name, body in change.new_objects.items():
        kind, _, own = name.rpartition(" ")
        yield f"add {kind} {_at(own)} {{ {body} }}"
    for name, spec in change.new_sets.items():
        yield f"add {'map' if spec.data else 'set'} {_at(name)} {{ {spec.declaration} }}"
    for name in change.new_chains:
        yield f"add chain {_at(name)}"
    for name, rules in change.rules.items():
        yield f"flush chain {_at(name)}"
        for rule in rules:
            yield f"add rule {_at(name)} {rule}"
    yield from _base_lines(change.bases)
    for name, pairs in change.removed.items():
        yield f"delete element {_at(name)} {{ {', '.join(pairs)} }}"
    for name, pairs in change.added.items():
        yield _add_elements(name, pairs.items())
    for name in (*change.old_bases, *change.old_chains):
        yield f"flush chain {_at(name)}"
    for name in (*change.old_bases, *change.old_chains):
        yield f"delete chain {_at(name)}"
    for name in change.old_sets:
        yield f"delete {'map' if change.specs[name].data else 'set'} {_at(name)}"
    for name in change.old_objects:
        kind, _, own = name.rpartition(" ")
        yield f"delete {kind} {_at(own)}"


def _add_elements(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    listed = (f"{key} : {value}" if value else key for key, value in pairs)
    return f"add element {_at(name)} {{ {', '.join(listed)} }}"


def _at(name: str) -> str:
    return f"{family_of(name)} {TABLE} {name}"
