"""Errors of incidents."""

from __future__ import annotations

from controlplane.core.errors import NotFound


class IncidentNotFound(NotFound):
    """No such incident; `bedplate incident list` shows the open ones."""

    code = "incident.not_found"
    title = "No such incident"
