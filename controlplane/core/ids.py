"""Ids carry their kind: `vm_01h…` is a type prefix and the Crockford base32 of a UUIDv7 (RFC 9562, section 5.7).

The one rule: an id is made by `new_id(Kind.X)` and nowhere else, so a prefix always tells the table.
"""

from __future__ import annotations

import os
import re
import time
from enum import StrEnum

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_ENCODED_LENGTH = 26
_ID = re.compile(r"[a-z]{2,5}_[0-9a-hjkmnp-tv-z]{26}")


class Kind(StrEnum):
    """The prefix of every id the product hands out."""

    ADDRESS = "addr"
    AUDIT = "aud"
    BACKEND = "be"
    DECISION = "dec"
    ENDPOINT = "ep"
    EVENT = "evt"
    FIREWALL = "fw"
    FIREWALL_RULE = "fwr"
    GPU = "gpu"
    HOST = "host"
    IMAGE = "img"
    IMAGE_COPY = "imgc"
    INCIDENT = "inc"
    KEY = "key"
    LOADBALANCER = "lb"
    LOGIN = "login"
    MEMBER = "mem"
    MODEL = "mod"
    NETWORK = "net"
    NIC = "nic"
    OPERATION = "op"
    POOL = "pool"
    PRICE = "price"
    PREFLIGHT = "pre"
    PROJECT = "proj"
    PROVIDER = "prov"
    PROJECT_KEY = "kek"
    REPLICA = "rep"
    REQUEST = "req"
    ROUTE = "rt"
    RUN = "run"
    SESSION = "sess"
    SNAPSHOT = "snap"
    STORAGE_POOL = "spool"
    TOKEN = "tok"  # noqa: S105 - a prefix, not a secret
    USER = "user"
    VM = "vm"
    VOLUME = "vol"


def new_id(kind: Kind) -> str:
    """A fresh id; ids of one kind made later sort later (to the millisecond)."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10))
    value = (value & ~(0xF << 76)) | (0x7 << 76)
    value = (value & ~(0x3 << 62)) | (0x2 << 62)
    digits = []
    for _ in range(_ENCODED_LENGTH):
        digits.append(_ALPHABET[value & 31])
        value >>= 5
    return f"{kind.value}_{''.join(reversed(digits))}"


def is_id(text: str, kind: Kind | None = None) -> bool:
    """Whether `text` has the form of an id (of `kind`, when given)."""
    return _ID.fullmatch(text) is not None and (kind is None or text.startswith(f"{kind.value}_"))
