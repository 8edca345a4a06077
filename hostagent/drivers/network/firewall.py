"""Which parts of the table this host's firewalls, nics and policy make, kept so that one change costs what it changes.

The one rule: nothing is filtered before the host has a policy; from then on a link that nobody told about passes nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hostagent.drivers.network.conntrack import Flow
from hostagent.drivers.network.firewall_sets import Box, Version, addresses_of
from hostagent.drivers.network.firewall_table import (
    combination_name,
    combination_part,
    firewall_boxes,
    firewall_part,
    has_rules,
    nic_part,
    policy_part,
)
from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.network import FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import Generation, NicWanted

Parts = dict[str, RulePart | None]
Kind = tuple[str, str, Version]
_LOCAL = ipaddress.IPv4Network("169.254.0.0/16")
_NO_GENERATION = Generation(epoch=0, number=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`parts`: what changes in the table, for `Ruleset.put`. `suspects`: nics that may do less than before."""

    parts: Parts
    suspects: frozenset[str] = frozenset()


class Firewalls:
    """Every change answers what it changes; `parts` are all parts."""

    def __init__(self) -> None:
        self.policy: PolicyWanted | None = None
        self._firewalls: dict[str, FirewallWanted] = {}
        self._nics: dict[str, NicWanted] = {}
        self._of_nic: dict[str, frozenset[str]] = {}
        self._users: dict[frozenset[str], set[str]] = {}  # nics by their combination
        self._sets: dict[str, RulePart] = {}
        self._boxes: dict[str, dict[Kind, tuple[Box, ...]]] = {}

    def firewall(self, firewall_id: str) -> FirewallWanted | None:
        return self._firewalls.get(firewall_id)

    def parts(self) -> dict[str, RulePart]:
        if self.policy is None:
            return {}
        found: Parts = {"policy": policy_part(self.policy)}
        found |= {f"firewall/{name}": part for name, part in self._sets.items()}
        found |= self._combinations(self._users)
        found |= self._elements(self._nics)
        return {name: part for name, part in found.items() if part is not None}

    def set_policy(self, policy: PolicyWanted | None) -> Change:
        before, old = dict.fromkeys(self.parts()), self.policy
        self.policy = policy
        is_narrower = policy is not None and (old is None or old.infrastructure_cidrs != policy.infrastructure_cidrs)
        suspects = frozenset(self._nics) if is_narrower else frozenset[str]()
        if before and policy is not None:
            return Change(parts={"policy": policy_part(policy)}, suspects=suspects)
        return Change(parts=before | self.parts(), suspects=suspects)

    def set_nic(self, nic: NicWanted) -> Parts:
        nic = replace(nic, generation=_NO_GENERATION)
        if self._nics.get(nic.id) == nic:
            return {}
        is_new = nic.id not in self._nics
        self._nics[nic.id] = nic
        return self._answer(self._enlist(nic.id) if is_new else (), (nic.id,))

    def drop_nic(self, nic_id: str) -> Parts:
        if self._nics.pop(nic_id, None) is None:
            return {}
        return self._answer(self._delist(nic_id), (nic_id,))

    def set_firewall(self, firewall: FirewallWanted | None, firewall_id: str) -> Change:
        """None: it is gone."""
        before, old_sets = self._firewalls.pop(firewall_id, None), self._sets.pop(firewall_id, None)
        old_boxes = self._boxes.pop(firewall_id, {})
        if firewall is not None:
            self._firewalls[firewall_id] = firewall
            self._boxes[firewall_id] = firewall_boxes(firewall)
            self._sets[firewall_id] = firewall_part(firewall_id, self._boxes[firewall_id])
        was = {member.nic_id for member in before.members} if before else set[str]()
        now = {member.nic_id for member in firewall.members} if firewall else set[str]()
        combinations = self._move(firewall_id, came=now - was, left=was - now)
        new_sets = self._sets.get(firewall_id)
        is_alike = old_sets is not None and new_sets is not None and old_sets.sets.keys() == new_sets.sets.keys()
        is_alike = is_alike and _kinds(before) == _kinds(firewall)  # an allow of nothing has no set and restricts all the same
        if not is_alike:  # its combinations look into other sets than before, and its nics may go by other chains
            combinations |= {users for users in self._users if firewall_id in users}
        parts = self._answer(combinations, was ^ now if is_alike else was | now)
        if self.policy is not None:
            parts[f"firewall/{firewall_id}"] = new_sets
        is_narrower = _is_narrower(old_boxes, self._boxes.get(firewall_id, {})) or not _kinds(firewall) <= _kinds(before)
        return Change(parts=parts, suspects=frozenset(was | now if is_narrower else was ^ now))

    def _move(self, firewall_id: str, *, came: set[str], left: set[str]) -> set[frozenset[str]]:
        """Nics enter or leave a firewall; the combinations that this concerns."""
        combinations: set[frozenset[str]] = set()
        for nic_id in came | left:
            combinations |= self._delist(nic_id)
            names = self._of_nic.pop(nic_id, frozenset()) - {firewall_id} | ({firewall_id} if nic_id in came else set())
            if names:
                self._of_nic[nic_id] = frozenset(names)
            combinations |= self._enlist(nic_id)
        return combinations

    def addresses(self, nic_ids: Iterable[str]) -> dict[str, str]:
        """Nic by address."""
        found = (self._nics[nic_id] for nic_id in nic_ids if nic_id in self._nics)
        return {address: nic.id for nic in found for address in (nic.ipv4, nic.ipv6) if address}

    def nic_ids(self) -> tuple[str, ...]:
        return tuple(self._nics)

    def allows(self, flow: Flow, nics: dict[str, str]) -> bool:
        """Whether a flow of these nics (by address) could be opened now. What passes between two nics must please both."""
        sender, receiver = nics.get(flow.original.source), nics.get(flow.reply.source)
        port = flow.reply.source_port
        is_sent = sender is None or self._may(sender, "egress", flow.protocol, port, flow.reply.source)
        return is_sent and (receiver is None or self._may(receiver, "ingress", flow.protocol, port, flow.original.source))

    def _may(self, nic_id: str, direction: str, protocol: int, port: int, far: str) -> bool:
        if self.policy is None:
            return True
        address = ipaddress.ip_address(far)
        version: Version = 4 if address.version == 4 else 6
        number, found = int(address), [self._boxes.get(name, {}) for name in self._of_nic.get(nic_id, ())]
        if direction == "egress" and (address in _LOCAL or self._is_infrastructure(number, version)):
            return False

        def is_in(action: str) -> bool:
            return any(
                box.protocols[0] <= protocol <= box.protocols[1]
                and box.ports[0] <= port <= box.ports[1]
                and box.addresses[0] <= number <= box.addresses[1]
                for kinds in found
                for box in kinds.get((direction, action, version), ())
            )

        if is_in("deny"):
            return False
        is_open = direction == "egress" and not self._restricts_egress(self._of_nic.get(nic_id, ()))
        return is_open or is_in("allow")

    def _is_infrastructure(self, number: int, version: Version) -> bool:
        assert self.policy is not None
        ranges = addresses_of(self.policy.infrastructure_cidrs, version)
        return any(first <= number <= last for first, last in ranges)

    def _restricts_egress(self, names: Iterable[str]) -> bool:
        return has_rules((self._firewalls[name] for name in names if name in self._firewalls), ("egress", "allow"))

    def _enlist(self, nic_id: str) -> set[frozenset[str]]:
        """Combinations that may have become used."""
        names = self._of_nic.get(nic_id)
        if names is None or nic_id not in self._nics:
            return set()
        self._users.setdefault(names, set()).add(nic_id)
        return {names}

    def _delist(self, nic_id: str) -> set[frozenset[str]]:
        names = self._of_nic.get(nic_id)
        if names is None or names not in self._users:
            return set()
        self._users[names].discard(nic_id)
        if not self._users[names]:
            del self._users[names]
        return {names}

    def _answer(self, combinations: Iterable[frozenset[str]], nics: Iterable[str]) -> Parts:
        if self.policy is None:
            return {}
        return self._combinations(combinations) | self._elements(nics)

    def _combinations(self, combinations: Iterable[frozenset[str]]) -> Parts:
        found: Parts = {}
        for names in combinations:
            restricts = self._restricts_egress(names)
            sets = {name: self._sets[name] for name in names if name in self._sets}
            key = f"combination/{combination_name(names)}"
            found[key] = combination_part(sets, restricts_egress=restricts) if names in self._users else None
        return found

    def _elements(self, nics: Iterable[str]) -> Parts:
        found: Parts = {}
        for nic_id in nics:
            nic = self._nics.get(nic_id)
            names = self._of_nic.get(nic_id, frozenset())
            firewalls = [self._firewalls[name] for name in names if name in self._firewalls]
            filters = any(has_rules(firewalls, ("egress", action)) for action in ("allow", "deny"))
            found[f"nic/{nic_id}"] = nic_part(nic, names, filters_egress=filters) if nic else None
        return found


def _kinds(firewall: FirewallWanted | None) -> set[tuple[str, str]]:
    return {(rule.direction, rule.action) for rule in firewall.rules} if firewall else set()


def _is_narrower(before: dict[Kind, tuple[Box, ...]], after: dict[Kind, tuple[Box, ...]]) -> bool:
    """Whether less may be allowed than before: an allow lost a box, or a deny won one, or egress is restricted from now on."""
    for kind in before.keys() | after.keys():
        old, new = set(before.get(kind, ())), set(after.get(kind, ()))
        direction, action, _ = kind
        if (new - old) if action == "deny" else (old - new):
            return True
        if (direction, action) == ("egress", "allow") and new and not old:
            return True
    return False
