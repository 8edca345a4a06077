"""Incidents: what an operator sees. One open row per (run or subject, code); a repeat counts.

The one rule: `detail` names the cause in words a person can act on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from controlplane.core import json
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.kernel import sql
from controlplane.kernel.service import Where, fetch
from controlplane.kernel.work import Work

DEADLINE_MISSED = "run.deadline_missed"
STEP_FAILING = "run.step_failing"
PROGRAM_UNKNOWN = "run.program_unknown"
SUBJECT_GONE = "run.subject_gone"
PATIENCE = 3  # tries of a step before an operator hears of it


async def open_incident(where: Where, code: str, subject: str, detail: str, context: Mapping[str, Json] | None = None) -> str:
    """Open an incident about a subject without a run (or count it once more); returns its id."""
    body = json.dumps(dict(context or {})).decode()
    rows = await fetch(where, sql.OPEN_INCIDENT, new_id(Kind.INCIDENT), code, subject, None, None, None, detail or code, body)
    return rows[0][0]


async def resolve_incident(where: Where, code: str, subject: str, *, by: str = "kernel") -> None:
    """Close the open incident of `open_incident`; none is success."""
    await fetch(where, sql.RESOLVE_SUBJECT_INCIDENT, subject, code, by)


async def open_run_incident(where: Where, work: Work, code: str, detail: str) -> None:
    await fetch(
        where,
        sql.OPEN_INCIDENT,
        new_id(Kind.INCIDENT),
        code,
        work.subject,
        work.run_id,
        work.program,
        work.step,
        detail or code,
        json.dumps({"attempt": work.attempt}).decode(),
    )


async def resolve_run_incidents(
    where: Where, run_id: str, codes: Sequence[str] | None = None, *, but: Sequence[str] = (), by: str = "kernel"
) -> None:
    """Close a run's open incidents: all, or those with these codes; `but` names codes to leave open."""
    await fetch(where, sql.RESOLVE_RUN_INCIDENTS, run_id, by, None if codes is None else list(codes), list(but))


_MUTE = {
    TimeoutError: "it took too long",
    ConnectionResetError: "the other side cut the connection",
    ConnectionRefusedError: "nothing listens there",
    ConnectionAbortedError: "the connection was cut",
    EOFError: "the other side ended in the middle",
    MemoryError: "there is no memory left",
}


def words(error: BaseException) -> str:
    """An exception as a sentence for an operator: its own words; where it has none, what its type means.

    Mistakes of the program (KeyError, AssertionError …) carry their type, because their text alone says nothing.
    """
    text = str(error).strip()
    if not text:
        return next((said for kind, said in _MUTE.items() if isinstance(error, kind)), type(error).__name__)
    is_mistake = isinstance(error, LookupError | AssertionError | TypeError | AttributeError | ArithmeticError)
    return f"{type(error).__name__}: {text}" if is_mistake and type(error) is not LookupError else text


def about(work: Work) -> str:
    """What a run is about, for a person: `vm web (vm_01h…)`."""
    name = f"{work.subject_name} ({work.subject})" if work.subject_name else work.subject
    return f"{work.program} {name}"


def code_of(error: BaseException) -> str:
    """The stable code an exception carries, else `run.step_failing`."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) and code else STEP_FAILING
