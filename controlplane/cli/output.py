"""What commands print. The one rule: data on stdout in the form asked for, words on stderr."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from controlplane.cli.size import show_bytes

Columns = Mapping[str, str]
"""Heading → dotted path into the item (`observed.state`)."""


class Format(StrEnum):
    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def say(words: str) -> None:
    """Words for a person."""
    print(words, file=sys.stderr)


def show_many(items: Iterable[Mapping[str, Any]], form: Format, columns: Columns, wide: Columns | None = None) -> None:
    """Print a list."""
    rows = list(items)
    match form:
        case Format.JSON:
            print(json.dumps(rows, indent=2, ensure_ascii=False))
        case Format.YAML:
            print(_yaml(rows), end="")
        case Format.NAME:
            for row in rows:
                print(row.get("name") or row.get("id"))
        case _:
            chosen = {**columns, **(wide or {})} if form is Format.WIDE else columns
            print_table(list(chosen), [[_cell_at(row, path) for path in chosen.values()] for row in rows])


def show_one(item: Mapping[str, Any], form: Format) -> None:
    """Print one thing; as a table: one line a field, deeper ones dotted."""
    match form:
        case Format.JSON:
            print(json.dumps(item, indent=2, ensure_ascii=False))
        case Format.YAML:
            print(_yaml(item), end="")
        case Format.NAME:
            print(item.get("name") or item.get("id"))
        case _:
            lines = list(_flat(item))
            width = max((len(name) for name, _ in lines), default=0)
            for name, value in lines:
                print(f"{name:<{width}}  {value}".rstrip())


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns; on a terminal the last one is cut to fit."""
    widths = [max(len(row[index]) for row in (headings, *rows)) for index in range(len(headings))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in (headings, *rows):
        line = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        print(line if limit is None or len(line) <= limit else line[: limit - 1] + "…")


def lookup(item: Any, path: str) -> Any:
    """The value at a dotted path, of each where it leads through a list; None where it breaks off."""
    for part in path.split("."):
        if isinstance(item, list):
            item = [lookup(one, part) for one in item]
            continue
        if not isinstance(item, Mapping):
            return None
        item = item.get(part)
    return item


def _cell_at(row: Mapping[str, Any], path: str) -> str:
    """What counts bytes is shown in the largest unit that it has one of."""
    value = lookup(row, path)
    return show_bytes(value) if path.endswith("_bytes") and isinstance(value, int) else cell(value)


def cell(value: Any) -> str:
    """A value in a table: times as ages, lists joined, null empty."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case list():
            return ",".join(cell(item) for item in value)
        case Mapping():
            return ",".join(f"{key}={cell(item)}" for key, item in value.items())
        case str() if (moment := _moment(value)) is not None:
            return age(moment)
        case _:
            return _printable(str(value))


def age(moment: datetime, now: datetime | None = None) -> str:
    """How long ago, in one unit: `45s`, `12m`, `5h`, `3d`; what lies ahead with `in`."""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    prefix, seconds = ("in ", -seconds) if seconds < -1 else ("", max(seconds, 0.0))
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size * (2 if unit != "d" else 1):
            return f"{prefix}{int(seconds // size)}{unit}"
    return f"{prefix}{int(seconds)}s"


def _moment(text: str) -> datetime | None:
    if len(text) < 20 or text[4] != "-" or text[10] != "T":
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _printable(text: str) -> str:
    """No control characters reach a terminal: what a tenant named a thing must not move an operator's cursor."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _flat(item: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in item.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, inner in enumerate(value):
                if {"type", "status", "reason", "message"} <= inner.keys():
                    yield f"{name}.{inner['type']}", _condition(inner)
                else:
                    yield from _flat(inner, f"{name}.{index}.")
        else:
            yield name, _printable(str(value)) if isinstance(value, str) else cell(value)


def _condition(item: Mapping[str, Any]) -> str:
    """`true for 5m`, `false for 3s: vm.no_capacity: None of 2 hosts can take it`."""
    since = _moment(str(item.get("since") or ""))
    status = f"{item['status']} for {age(since)}" if since else str(item["status"])
    return _printable(": ".join(str(part) for part in (status, item["reason"], item["message"]) if part))


def _yaml(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
