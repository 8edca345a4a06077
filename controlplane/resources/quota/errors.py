"""Errors of quotas."""

from __future__ import annotations

from controlplane.core.errors import Forbidden


class QuotaExceeded(Forbidden):
    """The project would have more than its quota allows; the context says of what, how much it has and what it may have. Delete
    something, or ask an operator for more (`bedplate project update NAME --quota RESOURCE=N`).
    """

    code = "quota.exceeded"
    title = "The project's quota does not allow that"
