"""Reads of incidents."""

from __future__ import annotations

from sqlalchemy import ColumnElement

from controlplane.models.incident import Incident


def in_state(state: str | None) -> tuple[ColumnElement[bool], ...]:
    """The condition of a list: `open`, `resolved`, or None for all."""
    match state:
        case "open":
            return (Incident.resolved_at.is_(None),)
        case "resolved":
            return (Incident.resolved_at.is_not(None),)
        case _:
            return ()
