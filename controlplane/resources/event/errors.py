"""Errors of the event stream."""

from __future__ import annotations

from controlplane.core.errors import InvalidInput


class EventPositionInvalid(InvalidInput):
    """`after` or `Last-Event-ID` is not a position; start without one, or with `after=0`."""

    code = "event.position_invalid"
    title = "The position is not valid"
