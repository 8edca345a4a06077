"""Programs: one class per kind of life, one method per step. Architecture section 4 in the reader's hands.

The one rule: every step may run twice, and `destroy` may follow any step. A step does one external thing, and what it
remembers or says to other runs commits with its outcome (or with the `self.tx()` it was said in).

`Program[Vm]` loads the row of `Vm` whose id is the run's subject before each step (`self.subject`); `Program[str]` loads
nothing (`self.subject` is the id). A second parameter types `self.world.hosts`: `Program[Vm, HostLinks]`.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from inspect import get_annotations
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

import asyncpg
from sqlalchemy import inspect

from controlplane.core.json import Json
from controlplane.kernel import sql
from controlplane.kernel.memo import Memo, NoMemo
from controlplane.kernel.outcome import (
    Done,
    Goto,
    Outcome,
    StepInfo,
    SubjectGone,
    Terminal,
    Wait,
    done,
    goto,
    step,
    step_info,
    wait,
)
from controlplane.kernel.tx import RawTx, Tx
from controlplane.kernel.work import Move, Send, SendParents, Start, Told, Work
from controlplane.kernel.world import Hosts, World

Subject = TypeVar("Subject")
Name: TypeAlias = "str | type[Program[Any, Any]]"
DESTROY = "destroy"
START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A run that this one spawned. `ready`: at rest, or finished."""

    run_id: str
    program: str
    subject: str
    state: Literal["working", "ready", "parked", "finished"]
    code: str | None


class Program(ABC, Generic[Subject, Hosts]):
    """Subclass it, decorate the steps in the order they happen, end with an idempotent `destroy`.

    `name` (by default the class's: VmProgram is `vm`) is what services start it by. Annotate `memo: MyMemo` to remember.
    """

    name: ClassVar[str]
    steps: ClassVar[Mapping[str, StepInfo]]
    first_step: ClassVar[str]
    model: ClassVar[type[Any] | None]
    memo_type: ClassVar[type[Memo]]
    memo: Memo = NoMemo()

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in cls.__dict__:
            noun = cls.__name__.removesuffix("Program").removesuffix("Reconciler")
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", noun).lower()
        found: dict[str, StepInfo] = {}
        for base in reversed(cls.__mro__):
            for attribute, value in base.__dict__.items():
                if (info := step_info(value)) is not None:
                    found[attribute] = info
        cls.steps = found
        cls.first_step = next((step for step in found if step != DESTROY), DESTROY)
        cls.model = _model_of(cls)
        cls.memo_type = _memo_of(cls)

    def __init__(self, work: Work, world: World[Hosts]) -> None:
        self._work = work
        self.world = world
        self._subject: Subject | None = None
        if self.memo_type is not NoMemo:
            self.memo = self.memo_type.load(work.stored_memo)
            work.dump_memo = self._dump_memo

    def _dump_memo(self) -> str:
        return self.memo.dump()

    async def load_subject(self) -> None:
        """Called by the kernel before each step."""
        if self.model is None:
            self._subject = cast("Subject", self.subject_id)
            return
        async with self.world.database.sessionmaker() as session:
            self._subject = cast("Subject | None", await session.get(self.model, self.subject_id))

    @abstractmethod
    async def destroy(self) -> Outcome:
        """Remove everything that any step may have made; absent is success. Decorate it with @step and end in `done`."""

    # -- what a step may look at --------------------------------------------------------------------------------------

    @property
    def run_id(self) -> str:
        return self._work.run_id

    @property
    def subject_id(self) -> str:
        return self._work.subject

    @property
    def subject(self) -> Subject:
        """The row as it was when the step began (detached; change rows through `tx.session`). Raises SubjectGone."""
        if self._subject is None:
            raise SubjectGone(f"{self.name} {self.subject_id} has no row")
        return self._subject

    @property
    def subject_name(self) -> str:
        """What people call the subject: its name, a host's address, or nothing."""
        named: Any = self._subject
        return str(getattr(named, "name", "") or getattr(named, "address", "") or "")

    @property
    def has_subject(self) -> bool:
        return self._subject is not None

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context of the request that started the run, to be handed on to hosts."""
        return self._work.traceparent

    @property
    def attempt(self) -> int:
        """1 for the first try of this step."""
        return self._work.attempt

    @property
    def signals(self) -> Sequence[Told]:
        """What was said since the last outcome, oldest first. Nudges: look at the world rather than trust a body."""
        return self._work.signals

    def has_signal(self, kind: str) -> bool:
        return any(told.kind == kind for told in self.signals)

    # -- transactions -------------------------------------------------------------------------------------------------

    def tx(self) -> AbstractAsyncContextManager[Tx]:
        """A short transaction, fenced by our lease, with an ORM session and a raw connection. Raises LeaseLost."""
        return self._work.tx()

    def raw_tx(self) -> AbstractAsyncContextManager[RawTx]:
        """The same with a raw asyncpg connection only: a third of the cost."""
        return self._work.raw_tx()

    # -- words to other runs: they commit with the surrounding tx, or with the outcome ----------------------------------

    def spawn(self, program: Name, *subjects: str, host_id: str | None = None) -> None:
        """Start a child run for each subject; one that exists becomes our child too.

        Twice in one step is once, even when the child has ended meanwhile; a later step may spawn it anew.
        """
        self._work.words.extend(Start(_name(program), subject, host_id) for subject in subjects)

    def signal(self, program: Name, subject: str, kind: str, body: Mapping[str, Json] | None = None) -> None:
        self._work.words.append(Send(_name(program), subject, kind, body or {}))

    def signal_parent(self, kind: str, body: Mapping[str, Json] | None = None) -> None:
        self._work.words.append(SendParents(kind, body or {}))

    def destroy_child(self, program: Name, *subjects: str) -> None:
        """Ask for the end of children; wait for `children_gone`."""
        self._work.words.extend(Send(_name(program), subject, DESTROY, {}) for subject in subjects)

    def move_to(self, host_id: str) -> None:
        """From the next claim on this run is served by the process that serves this host."""
        self._work.words.append(Move(host_id))

    async def children(self) -> Sequence[Child]:
        rows = await self.world.database.pool.fetch(sql.CHILDREN, self.run_id)
        return [_child(row) for row in rows]

    async def children_ready(self) -> bool:
        """Whether every child is at rest or finished. Raises Terminal with the code of one that is parked."""
        children = await self.children()
        for child in children:
            if child.state == "parked":
                raise Terminal(child.code or "run.child_parked", f"{child.program} {child.subject} has failed: {child.code}")
        return all(child.state in ("ready", "finished") for child in children)

    async def children_gone(self) -> bool:
        return all(child.state == "finished" for child in await self.children())


def _name(program: Name) -> str:
    return program if isinstance(program, str) else program.name


def _child(row: asyncpg.Record) -> Child:
    if row["finished_at"] is not None:
        state = "finished"
    elif row["parked_code"] is not None:
        state = "parked"
    else:
        state = "ready" if row["ready_at"] is not None else "working"
    return Child(run_id=row["id"], program=row["program"], subject=row["subject"], state=state, code=row["parked_code"])


def _model_of(cls: type[Program[Any, Any]]) -> type[Any] | None:
    """The mapped class in `Program[Vm]`, looked for in the bases too; None for `Program[str]`."""
    for base in cls.__mro__:
        for generic in base.__dict__.get("__orig_bases__", ()):
            origin, arguments = get_origin(generic), get_args(generic)
            if isinstance(origin, type) and issubclass(origin, Program) and arguments and isinstance(arguments[0], type):
                return arguments[0] if inspect(arguments[0], raiseerr=False) is not None else None
    return None


def _memo_of(cls: type[Program[Any, Any]]) -> type[Memo]:
    """The class in the annotation `memo: VmMemo`; it must be a module-level name."""
    for base in cls.__mro__[: cls.__mro__.index(Program)]:
        annotation = get_annotations(base).get("memo")
        if annotation is not None:
            found = eval(annotation, vars(sys.modules[base.__module__])) if isinstance(annotation, str) else annotation  # noqa: S307
            assert isinstance(found, type)
            assert issubclass(found, Memo)
            return found
    return NoMemo


__all__ = [
    "Done",
    "Goto",
    "Memo",
    "Outcome",
    "Program",
    "SubjectGone",
    "Terminal",
    "Told",
    "Wait",
    "World",
    "done",
    "goto",
    "step",
    "wait",
]
