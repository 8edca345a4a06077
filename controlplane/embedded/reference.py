"""Writes docs/reference/configuration.md from the settings: `python -m controlplane.embedded.reference`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from controlplane.settings import Settings, default_state_dir

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/configuration.md"
_HEAD = """# Configuration

Generated from the settings (`make docs`). A setting is an environment variable, or a key of `/etc/bedplate/config.toml`
(another file by `BEDPLATE_CONFIG`). The environment wins over the file; an unknown key in either ends the program at its
start.

| variable | key in config.toml | default | meaning |
| --- | --- | --- | --- |
"""


def variables() -> Iterator[tuple[str, str, FieldInfo]]:
    """Every setting: environment variable, dotted key, field."""
    yield from _of(Settings, ())


def _of(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[str, str, FieldInfo]]:
    for name, field in model.model_fields.items():
        here = (*path, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _of(field.annotation, here)
        else:
            yield "BEDPLATE_" + "__".join(part.upper() for part in here), ".".join(here), field


def _default(field: FieldInfo) -> str:
    if field.default_factory is default_state_dir:
        return "`/var/lib/bedplate`; not as root `~/.local/state/bedplate`"
    value = field.get_default(call_default_factory=True)
    if value in (None, "", (), []):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def page() -> str:
    rows: list[str] = []
    for variable, key, field in variables():
        meaning = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{variable}` | `{key}` | {_default(field)} | {meaning} |")
    return _HEAD + "\n".join(rows) + "\n"


def main() -> int:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
