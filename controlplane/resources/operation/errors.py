"""Errors of operations."""

from __future__ import annotations

from controlplane.core.errors import NotFound


class OperationNotFound(NotFound):
    """No such operation, or not yours to see."""

    code = "operation.not_found"
    title = "No such operation"
