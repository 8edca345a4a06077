"""What a step returns, and how a method becomes a step.

The one rule: a step ends in exactly one of `goto`, `wait`, `done` (returned), `Terminal` (raised: the run parks) or any
other exception (try again).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from controlplane.core.json import Json

StepMethod: TypeAlias = "Callable[[], Awaitable[Outcome]]"
_MARK = "__bedplate_step__"


@dataclass(frozen=True, slots=True)
class Goto:
    step: str


@dataclass(frozen=True, slots=True)
class Wait:
    """`seconds` None: only a signal wakes the run."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class Done:
    result: Mapping[str, Json] | None


Outcome: TypeAlias = Goto | Wait | Done


@dataclass(frozen=True, slots=True)
class StepInfo:
    """`within` None marks a rest step: a run may stay in it for ever, and a child in it counts as ready."""

    name: str
    within: timedelta | None

    @property
    def seconds(self) -> float | None:
        return None if self.within is None else self.within.total_seconds()


class Terminal(Exception):
    """Trying again cannot help: the run parks with this stable dotted code, and an incident tells the operator."""

    def __init__(self, code: str, detail: str = "") -> None:
        self.code = code
        self.detail = detail or code
        super().__init__(f"{code}: {self.detail}")


class SubjectGone(Exception):
    """The row this run is about does not exist (any more)."""


class LeaseLost(Exception):
    """Another worker holds this run now: whatever this one still wanted to write is refused."""


def goto(step: StepMethod) -> Goto:
    """Go on with `step` at once; its deadline starts now."""
    return Goto(step_name(step))


def wait(delay: timedelta | None = None, *, seconds: float | None = None) -> Wait:
    """Come back to this step after the delay or by the next signal; without a delay only by a signal.

    The step's deadline runs on.
    """
    if delay is not None:
        return Wait(delay.total_seconds())
    return Wait(seconds)


def done(result: Mapping[str, Json] | None = None) -> Done:
    """The run has ended. Refused while an unseen signal is left: then the step is run again."""
    return Done(result)


_Method = TypeVar("_Method", bound=Callable[[Any], Awaitable[Outcome]])


def step(*, within: timedelta | None) -> Callable[[_Method], _Method]:
    """Make a method a step that must be left `within` this time; None declares a rest step (see StepInfo)."""

    def mark(method: _Method) -> _Method:
        setattr(method, _MARK, StepInfo(method.__name__, within))
        return method

    return mark


def step_info(attribute: object) -> StepInfo | None:
    return getattr(attribute, _MARK, None)


def step_name(method: StepMethod) -> str:
    info = step_info(method)
    if info is None:
        raise TypeError(f"{method!r} is not a step: decorate it with @step(within=…)")
    return info.name
