"""Errors the agent answers with: a stable dotted code, a sentence, and whether trying again may help."""

from __future__ import annotations

from typing import Any


class AgentError(Exception):
    """`code` is stable (`disk.full`), `retryable` says whether the same request may succeed later."""

    def __init__(self, code: str, message: str, *, retryable: bool = True, **context: Any) -> None:
        self.code = code
        self.message = message
        self.retryable = retryable
        self.context = context
        super().__init__(f"{code}: {message}")
