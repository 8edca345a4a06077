"""`python -m controlplane.api.reference [--write]`: the generated pages `docs/reference/{openapi.json,errors.md}`.

The one rule: a test compares them with what is committed, so they never lie.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from pathlib import Path

import orjson

import controlplane
from controlplane.api.app import create_app
from controlplane.api.openapi import document
from controlplane.core.errors import BedplateError, catalogue
from controlplane.core.sealing import KEY_BYTES, Sealer
from controlplane.settings import Settings

DIRECTORY = Path(next(iter(controlplane.__path__))).parent / "docs/reference"


class _NoDatabase:
    """The document needs none."""

    @property
    def sessionmaker(self) -> None:
        raise RuntimeError("no database here")


def openapi() -> str:
    """The OpenAPI document, sorted, as it is committed."""
    app = create_app(Settings(), _NoDatabase(), sealer=Sealer(bytes(KEY_BYTES)))  # pyright: ignore[reportArgumentType]
    return orjson.dumps(document(app), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode() + "\n"


def errors() -> str:
    """Every error type of the product, as a page."""
    for found in pkgutil.walk_packages(controlplane.__path__, "controlplane."):
        if found.name.endswith(".errors") or found.name == "controlplane.core.paging":
            importlib.import_module(found.name)
    lines = [
        "# Errors",
        "",
        "Every error of the API is an `application/problem+json` (RFC 9457) with one of these codes. Generated from the error",
        "types by `python -m controlplane.api.reference --write`; do not edit.",
        "",
        "| code | status | title | what it means, what to do |",
        "|---|---|---|---|",
    ]
    kinds = [kind for kind in catalogue() if kind.__module__.startswith("controlplane.")]
    lines += [f"| `{kind.code}` | {kind.status} | {kind.title} | {_explanation(kind)} |" for kind in kinds]
    return "\n".join(lines) + "\n"


def _explanation(kind: type[BedplateError]) -> str:
    if kind is BedplateError:
        return "An unexpected error; the log has the cause under the request id."
    return " ".join((kind.__doc__ or "").split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m controlplane.api.reference", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the pages instead of listing their sizes")
    is_write = parser.parse_args().write
    for name, text in (("openapi.json", openapi()), ("errors.md", errors())):
        if is_write:
            DIRECTORY.mkdir(parents=True, exist_ok=True)
            (DIRECTORY / name).write_text(text)
        print(f"{name}: {len(text)} characters")


if __name__ == "__main__":
    main()
