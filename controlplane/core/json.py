"""JSON in and out, and the types that name it. The one rule: bytes on the wire are made here, sorted where compared."""

from __future__ import annotations

from typing import TypeAlias

import orjson

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Json]"


def dumps(value: object) -> bytes:
    """Compact UTF-8 JSON; datetimes as RFC 3339 with `Z`."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z)


def canonical(value: object) -> bytes:
    """The same bytes for the same value (keys sorted): for digests and comparisons."""
    return orjson.dumps(value, option=orjson.OPT_UTC_Z | orjson.OPT_SORT_KEYS)


def loads(data: bytes | str) -> Json:
    """Parse; raises ValueError on anything that is not JSON."""
    return orjson.loads(data)
