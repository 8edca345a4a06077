"""A change of the table as the kernel takes it, without nft: sets, chains, rules and elements as messages of one batch.

The one rule: the order is that of the text (`table.render_change`), and both lead to the same table. What cannot be said here
is Unsupported and goes by nft, which first asks the kernel for all sets and chains that there are: 40 ms on a host with a
thousand firewalls. Source: Linux, include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from hostagent.drivers.network.nfelements import Unsupported, elements
from hostagent.drivers.network.nfnetlink import FAMILIES, LIST_ELEM, MSG_NEWRULE, attribute, nested, number, text
from hostagent.drivers.network.nfrules import expressions
from hostagent.drivers.network.protocol import FieldType, RuleChange, SetSpec
from hostagent.drivers.network.table import TABLE, family_of

MSG_NEWCHAIN, MSG_DELCHAIN = 3, 5
MSG_DELRULE = 8
MSG_NEWSET, MSG_DELSET = 9, 11
MSG_NEWSETELEM, MSG_DELSETELEM = 12, 14
CHAIN_TABLE, CHAIN_NAME = 1, 3
RULE_TABLE, RULE_CHAIN, RULE_EXPRESSIONS = 1, 2, 4
SET_TABLE, SET_NAME, SET_FLAGS, SET_KEY_TYPE, SET_KEY_LEN, SET_DESC, SET_ID, SET_USERDATA = 1, 2, 3, 4, 5, 9, 10, 13
DESC_CONCAT, FIELD_LEN = 2, 1
SET_IS_INTERVAL, SET_IS_CONCAT = 0x4, 0x80
TYPE_BITS = 6
USERDATA_KEY_BYTEORDER = b"\0\4\0\0\0\0"  # libnftables' own note (type 0, 4 bytes): of a concatenation there is none
MAX_ELEMENTS = 5_000
MAX_RULES = 1_000

_TYPES: dict[FieldType, tuple[int, int]] = {  # (libnftables' number of the type, bytes)
    "ipv4_addr": (7, 4),
    "ipv6_addr": (8, 16),
    "inet_proto": (12, 1),
    "inet_service": (13, 2),
}

Message = tuple[int, int, bytes]
"""(message type, family, body)."""


def messages_of(change: RuleChange) -> list[Message]:
    """In order. Raises Unsupported."""
    if sum(map(len, (*change.removed.values(), *change.added.values()))) > MAX_ELEMENTS:
        raise Unsupported("more elements than a few")
    if change.new_objects or change.old_objects or change.bases or change.old_bases:
        raise Unsupported("objects, or base chains")
    if sum(map(len, change.rules.values())) > MAX_RULES:
        raise Unsupported("more rules than a few")
    return list(_messages(change))


def _messages(change: RuleChange) -> Iterator[Message]:
    for identity, (name, spec) in enumerate(change.new_sets.items(), 1):
        yield MSG_NEWSET, _family(name), _set(name, spec, identity)
    for name in change.new_chains:
        yield MSG_NEWCHAIN, _family(name), _named(name)
    yield from _flushes(name for name in change.rules if name not in change.new_chains)
    for name, rules in change.rules.items():
        head = attribute(RULE_TABLE, text(TABLE)) + attribute(RULE_CHAIN, text(name))
        for rule in rules:
            yield MSG_NEWRULE, _family(name), head + nested(RULE_EXPRESSIONS, expressions(rule, change.specs))
    yield from _elements(MSG_DELSETELEM, change.removed, change.specs)
    yield from _elements(MSG_NEWSETELEM, change.added, change.specs)
    yield from _flushes(change.old_chains)
    for name in change.old_chains:
        yield MSG_DELCHAIN, _family(name), _named(name)
    for name in change.old_sets:
        yield MSG_DELSET, _family(name), attribute(SET_TABLE, text(TABLE)) + attribute(SET_NAME, text(name))


def _elements(kind: int, sets: Mapping[str, Mapping[str, str]], specs: Mapping[str, SetSpec]) -> Iterator[Message]:
    for name, pairs in sets.items():
        for body in elements(name, specs[name], pairs, is_removal=kind == MSG_DELSETELEM):
            yield kind, _family(name), body


def _flushes(chains: Iterable[str]) -> Iterator[Message]:
    for name in chains:
        yield MSG_DELRULE, _family(name), attribute(RULE_TABLE, text(TABLE)) + attribute(RULE_CHAIN, text(name))


def _set(name: str, spec: SetSpec, identity: int) -> bytes:
    """One that `type a . b; flags interval;` declares, of several fields: what a firewall has. Raises Unsupported."""
    kinds = " . ".join(spec.key)
    if spec.data or len(spec.key) < 2 or spec.declaration != f"type {kinds}; flags interval;":
        raise Unsupported(f"{name} is of another kind")
    kind, size, lengths = 0, 0, b""
    for one in spec.key:
        if one not in _TYPES:
            raise Unsupported(f"{name} has a field of type {one}")
        kind = kind << TYPE_BITS | _TYPES[one][0]
        size += (_TYPES[one][1] + 3) & ~3
        lengths += nested(LIST_ELEM, attribute(FIELD_LEN, number(_TYPES[one][1])))
    head = attribute(SET_TABLE, text(TABLE)) + attribute(SET_NAME, text(name)) + attribute(SET_ID, number(identity))
    told = ((SET_FLAGS, SET_IS_INTERVAL | SET_IS_CONCAT), (SET_KEY_TYPE, kind), (SET_KEY_LEN, size))
    body = b"".join(attribute(attr, number(value)) for attr, value in told)
    return head + body + nested(SET_DESC, nested(DESC_CONCAT, lengths)) + attribute(SET_USERDATA, USERDATA_KEY_BYTEORDER)


def _named(name: str) -> bytes:
    return attribute(CHAIN_TABLE, text(TABLE)) + attribute(CHAIN_NAME, text(name))


def _family(name: str) -> int:
    return FAMILIES[family_of(name)]
