"""Amounts of money: whole millionths of the deployment's currency inside, decimal text outside. Never floats."""

from __future__ import annotations

import re
from decimal import Decimal

MICROS = 1_000_000
_FORM = re.compile(r"[0-9]{1,12}(\.[0-9]{1,6})?")


def micros_of(text: str) -> int:
    """`12.5` is 12 500 000; raises ValueError for more than six decimals, a sign, or no number."""
    if not _FORM.fullmatch(text):
        raise ValueError(f"{text!r} is no amount, like 12.50: digits, with up to six decimals")
    return int(Decimal(text) * MICROS)


def text_of(micros: int) -> str:
    """The shortest text with at least two decimals."""
    whole, rest = divmod(abs(micros), MICROS)
    decimals = f"{rest:06d}".rstrip("0").ljust(2, "0")
    return f"{'-' if micros < 0 else ''}{whole}.{decimals}"
