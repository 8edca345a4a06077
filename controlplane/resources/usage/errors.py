"""Errors of usage."""

from __future__ import annotations

from controlplane.core.errors import InvalidInput


class UsageRangeInvalid(InvalidInput):
    """`until` must be after `since`, and hours can be asked for at most 62 days at once."""

    code = "usage.range_invalid"
    title = "The time asked for is not valid"
