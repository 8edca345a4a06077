"""What a host refused for good parks the run; everything else is tried again. For every program that speaks to hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from controlplane.kernel.outcome import Terminal
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed, Running, Succeeded

_LOOK_AGAIN = frozenset({"generation.stale"})
"""Not retryable as they are, but the next try reads a newer row."""


@contextlib.contextmanager
def refusals_park() -> Iterator[None]:
    """Turn an agent's error that no retry can cure into Terminal with the same code."""
    try:
        yield
    except AgentError as error:
        if error.retryable or error.code in _LOOK_AGAIN:
            raise
        raise Terminal(error.code, error.message) from error


def carried_out(result: Running | Succeeded | Failed) -> Succeeded | None:
    """The success, or None while work goes on; raises the failure as AgentError."""
    if isinstance(result, Failed):
        raise AgentError(result.code, result.message, retryable=result.retryable, **result.context)
    return result if isinstance(result, Succeeded) else None
