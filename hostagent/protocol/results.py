"""What `ensure` and `purge` answer. Long work runs detached: `Running` now, `Succeeded` or `Failed` when asked again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """`step` is the word a person may read (`upload`, `boot`); `needs` lists files the control plane must upload first."""

    kind: Literal["running"] = "running"
    step: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    kind: Literal["succeeded"] = "succeeded"
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    code: str
    message: str
    retryable: bool
    kind: Literal["failed"] = "failed"
    context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The body of an answer to `*.ensure` and `*.purge`."""

    result: Running | Succeeded | Failed
