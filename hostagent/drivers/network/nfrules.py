"""A rule's text as the kernel's expressions: those kinds of rules that come and go with firewalls and services.

The one rule: the text is what a rule means, here it is only said in the kernel's words. What is not known here is Unsupported
and goes by nft, so that nothing needs to be complete. Registers hold 32 bits; a concatenation fills them from the first one on.
Source: Linux, include/uapi/linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from hostagent.drivers.network.nfelements import DATA_VALUE, DATA_VERDICT, VERDICTS, Unsupported, field, verdict
from hostagent.drivers.network.nfnetlink import LIST_ELEM, OBJECT_COUNTER, attribute, nested, number, text
from hostagent.drivers.network.protocol import FieldType, SetSpec

EXPR_NAME, EXPR_DATA = 1, 2
REG_VERDICT, REG_1, REG32_00 = 0, 1, 8
DESTINATION = 1  # the attribute of whatever loads a register
META_KEY = 2
META_NFPROTO, META_L4PROTO = 15, 16
NFPROTO = {"ip": 2, "ip6": 10}
PAYLOAD_BASE, PAYLOAD_OFFSET, PAYLOAD_LEN = 2, 3, 4
NETWORK_HEADER, TRANSPORT_HEADER = 1, 2
CT_KEY, CT_SREG, CT_MARK = 2, 4, 3
CMP_SREG, CMP_OP, CMP_DATA = 1, 2, 3
COMPARISONS = {"==": 0, "!=": 1, "<": 2, "<=": 3, ">": 4, ">=": 5}
LOOKUP_SET, LOOKUP_SREG, LOOKUP_DREG = 1, 2, 3
OBJREF_TYPE, OBJREF_NAME = 1, 2
IMMEDIATE_DATA = 2
NUMGEN_MODULUS, NUMGEN_TYPE, NUMGEN_OFFSET = 2, 3, 4
NUMGEN = {"inc": 0, "random": 1}
NAT_TYPE, NAT_FAMILY, NAT_ADDRESS, NAT_ADDRESS_MAX, NAT_PORT, NAT_PORT_MAX, NAT_FLAGS = 1, 2, 3, 4, 5, 6, 7
NAT_DESTINATION = 1
NAT_HAS_ADDRESS, NAT_HAS_PORT = 1, 2

Words = list[str]


class Field(NamedTuple):
    """What one word of the text reads: `load` without its register, `bytes_` long. `family`: "" where both have it."""

    kind: FieldType
    bytes_: int
    expression: str
    load: tuple[tuple[int, int], ...]
    family: str = ""


def _payload(kind: FieldType, base: int, offset: int, bytes_: int, family: str = "") -> Field:
    load = ((PAYLOAD_BASE, base), (PAYLOAD_OFFSET, offset), (PAYLOAD_LEN, bytes_))
    return Field(kind, bytes_, "payload", load, family)


FIELDS = {
    "ip saddr": _payload("ipv4_addr", NETWORK_HEADER, 12, 4, "ip"),
    "ip daddr": _payload("ipv4_addr", NETWORK_HEADER, 16, 4, "ip"),
    "ip6 saddr": _payload("ipv6_addr", NETWORK_HEADER, 8, 16, "ip6"),
    "ip6 daddr": _payload("ipv6_addr", NETWORK_HEADER, 24, 16, "ip6"),
    "th sport": _payload("inet_service", TRANSPORT_HEADER, 0, 2),
    "th dport": _payload("inet_service", TRANSPORT_HEADER, 2, 2),
    "meta l4proto": Field("inet_proto", 1, "meta", ((META_KEY, META_L4PROTO),)),
    "ct mark": Field("mark", 4, "ct", ((CT_KEY, CT_MARK),)),
}


@lru_cache(maxsize=64)
def _constant(rule: str) -> bytes:
    return _Rule(rule, {}).encoded()


def expressions(rule: str, specs: Mapping[str, SetSpec]) -> bytes:
    """The list of a rule's expressions. `specs`: of the sets that it may look into. Raises Unsupported."""
    return _Rule(rule, specs).encoded() if "@" in rule else _constant(rule)


class _Rule:
    def __init__(self, rule: str, specs: Mapping[str, SetSpec]) -> None:
        self._words: Words = rule.split()
        self._at = 0
        self._specs = specs
        self._family = ""
        self._found: list[bytes] = []

    def encoded(self) -> bytes:
        while self._at < len(self._words):
            self._statement()
        return b"".join(self._found)

    def _statement(self) -> None:
        if self._takes("counter", "name"):
            self._add("objref", (OBJREF_TYPE, number(OBJECT_COUNTER)), (OBJREF_NAME, text(self._next())))
        elif self._peek() in VERDICTS:
            word = self._next()
            name = f" {self._next()}" if word in ("goto", "jump") else ""
            data = nested(DATA_VERDICT, verdict(word + name))
            self._add_nested("immediate", attribute(DESTINATION, number(REG_VERDICT)) + nested(IMMEDIATE_DATA, data))
        elif self._takes("ct", "mark", "set"):
            self._mapped(self._loaded())
            self._add("ct", (CT_SREG, number(REG_1)), (CT_KEY, number(CT_MARK)))
        elif self._takes("dnat"):
            self._translation()
        else:
            self._match()

    def _match(self) -> None:
        kinds = self._loaded()
        if self._takes("vmap"):
            self._lookup(kinds, REG_VERDICT)
        elif self._peek().startswith("@"):
            self._lookup(kinds, None)
        elif len(kinds) == 1:
            operation = COMPARISONS[self._next()] if self._peek() in COMPARISONS else COMPARISONS["=="]
            first, last = field(kinds[0], self._next())
            if first != last:
                raise Unsupported("a range")
            self._compare(operation, first)
        else:
            raise Unsupported("a concatenation of values")

    def _translation(self) -> None:
        family = self._next()
        if family not in NFPROTO or not self._takes("to"):
            raise Unsupported("a translation of another kind")
        data = self._mapped(self._loaded())
        if len(data) != 2:
            raise Unsupported("a translation to other than address and port")
        port = _register(4 if family == "ip6" else 1)
        self._add(
            "nat",
            (NAT_TYPE, number(NAT_DESTINATION)),
            (NAT_FAMILY, number(NFPROTO[family])),
            (NAT_ADDRESS, number(REG_1)),
            (NAT_ADDRESS_MAX, number(REG_1)),
            (NAT_PORT, number(port)),
            (NAT_PORT_MAX, number(port)),
            (NAT_FLAGS, number(NAT_HAS_ADDRESS | NAT_HAS_PORT)),
        )

    def _loaded(self) -> tuple[FieldType, ...]:
        """The fields that stand here joined by dots are in the registers afterwards. Answers their types."""
        fields = [self._field()]
        while self._takes("."):
            fields.append(self._field())
        for family in {one.family for one in fields if one.family}:
            self._be_of(family)
        word = 0
        for one in fields:
            load = ((kind, number(value)) for kind, value in one.load)
            self._add(one.expression, (DESTINATION, number(_register(word))), *load)
            word += (one.bytes_ + 3) // 4
        return tuple(one.kind for one in fields)

    def _field(self) -> Field:
        name = f"{self._next()} {self._next()}"
        if name in FIELDS:
            return FIELDS[name]
        kind = name.removeprefix("numgen ")
        if kind in NUMGEN and self._takes("mod"):
            load = ((NUMGEN_MODULUS, int(self._next())), (NUMGEN_TYPE, NUMGEN[kind]), (NUMGEN_OFFSET, 0))
            return Field("number", 4, "numgen", load)
        raise Unsupported(f"{name} is not read here")

    def _be_of(self, family: str) -> None:
        """The inet table's packets are of two families; a rule that reads one's header says first which it means."""
        if self._family == family:
            return
        if self._family:
            raise Unsupported("two families in a rule")
        self._family = family
        self._add("meta", (DESTINATION, number(REG_1)), (META_KEY, number(META_NFPROTO)))
        self._compare(COMPARISONS["=="], bytes((NFPROTO[family],)))

    def _compare(self, operation: int, value: bytes) -> None:
        head = attribute(CMP_SREG, number(REG_1)) + attribute(CMP_OP, number(operation))
        self._add_nested("cmp", head + nested(CMP_DATA, attribute(DATA_VALUE, value)))

    def _mapped(self, kinds: tuple[FieldType, ...]) -> tuple[FieldType, ...]:
        """What the map that is named here has for the registers is in them afterwards. Answers its types."""
        if not self._takes("map"):
            raise Unsupported("a value that no map has")
        return self._lookup(kinds, REG_1)

    def _lookup(self, kinds: tuple[FieldType, ...], destination: int | None) -> tuple[FieldType, ...]:
        name = self._next().removeprefix("@")
        spec = self._specs.get(name)
        if spec is None or spec.key != kinds or bool(spec.data) != (destination is not None):
            raise Unsupported(f"{name} is not known as what is looked into here")
        where = [(LOOKUP_DREG, number(destination))] if destination is not None else []
        self._add("lookup", (LOOKUP_SET, text(name)), (LOOKUP_SREG, number(REG_1)), *where)
        return spec.data

    def _add(self, name: str, *inside: tuple[int, bytes]) -> None:
        self._add_nested(name, b"".join(attribute(kind, value) for kind, value in inside))

    def _add_nested(self, name: str, inside: bytes) -> None:
        self._found.append(nested(LIST_ELEM, attribute(EXPR_NAME, text(name)), nested(EXPR_DATA, inside)))

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _next(self) -> str:
        word = self._peek()
        if not word:
            raise Unsupported("the rule ends too early")
        self._at += 1
        return word

    def _takes(self, *words: str) -> bool:
        if tuple(self._words[self._at : self._at + len(words)]) != words:
            return False
        self._at += len(words)
        return True


def _register(word: int) -> int:
    """The number of the register that begins `word` 32-bit words after the first."""
    return REG_1 + word // 4 if word % 4 == 0 else REG32_00 + word
