"""`-f FILE`: any request body as YAML (or JSON, which is YAML). The one rule: options given on the command line win."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controlplane.cli.errors import CommandFailed, Exit


def read(file: Path | None) -> dict[str, Any]:
    """The mapping in `file` (`-`: stdin); empty without a file. Raises CommandFailed."""
    if file is None:
        return {}
    import yaml

    name = "stdin" if str(file) == "-" else str(file)
    try:
        text = sys.stdin.read() if name == "stdin" else file.read_text()
        content = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CommandFailed(f"cannot read {name}", why=str(error), exit_code=Exit.USAGE) from error
    if not isinstance(content, dict):
        raise CommandFailed(f"{name} does not hold a mapping", exit_code=Exit.USAGE)
    return content


def merged(file: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The file's body with the options that were given (not None) laid over it."""
    return {**read(file), **{name: value for name, value in options.items() if value is not None}}


def pairs(given: list[str] | None, option: str = "--label") -> dict[str, str] | None:
    """`k=v` options as a mapping; None when there are none. Raises CommandFailed."""
    if not given:
        return None
    found: dict[str, str] = {}
    for text in given:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise CommandFailed(f"{option} takes KEY=VALUE, not {text!r}", exit_code=Exit.USAGE)
        found[key] = value
    return found
