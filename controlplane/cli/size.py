"""Sizes as people write them: `512M`, `2G`, `1.5Ti`. The one rule: every unit is a power of 1024, as memory and disks are."""

from __future__ import annotations

import re

from controlplane.cli.errors import CommandFailed, Exit

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:I?B)?", re.IGNORECASE)


def parse_bytes(text: str | None, option: str) -> int | None:
    """Bytes of `text`; None for None. Raises CommandFailed."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise CommandFailed(f"{option} takes a size like 512M or 2G, not {text!r}", exit_code=Exit.USAGE)
    return int(float(match[1]) * (1 << _UNITS[match[2].upper()]))


def show_bytes(count: int) -> str:
    """In the largest unit of which there is one, with at most one decimal: `512M`, `1.5G`."""
    unit = max((name for name, shift in _UNITS.items() if count >> shift), key=_UNITS.__getitem__, default="")
    return f"{count / (1 << _UNITS[unit]):.1f}".removesuffix(".0") + unit
