"""JSON lines on the wire: requests, answers, events, and their limits.

Control plane to agent: `{"id":7,"verb":"vm.ensure","deadline_ms":30000,"traceparent":null,"body":{…}}`, or
`{"cancel":7}`. Agent to control plane: `{"id":7,"ok":true,"body":{…}}`, `{"id":7,"ok":false,"error":{…}}`, or an event
`{"event":"vm.exited","log":"…","seq":12,"body":{…}}`. Deadlines are relative because clocks differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hostagent.protocol.errors import AgentError

MAX_LINE_BYTES = 1 << 20
MAX_IN_FLIGHT = 64
MAX_CHANNELS = 8


class FrameError(ValueError):
    """A line that is not a frame: too long, not JSON, or not one of the known forms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: int
    verb: str
    deadline_ms: int
    body: dict[str, Any]
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    cancel: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`error` is None exactly when the verb succeeded."""

    id: int
    body: dict[str, Any] = field(default_factory=dict)
    error: AgentError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """(log, seq) is the cursor; the log id changes when the agent's event log starts anew."""

    event: str
    log: str
    seq: int
    body: dict[str, Any]


Frame = Request | Cancel | Answer | Event


def encode(frame: Frame) -> bytes:
    """One line with its newline; raises FrameError when it is over MAX_LINE_BYTES."""
    line = json.dumps(_plain(frame), separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise FrameError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    return line


def _plain(frame: Frame) -> dict[str, Any]:
    if isinstance(frame, Cancel):
        return {"cancel": frame.cancel}
    if isinstance(frame, Event):
        return {"event": frame.event, "log": frame.log, "seq": frame.seq, "body": frame.body}
    if isinstance(frame, Request):
        return {
            "id": frame.id,
            "verb": frame.verb,
            "deadline_ms": frame.deadline_ms,
            "traceparent": frame.traceparent,
            "body": frame.body,
        }
    if frame.error is None:
        return {"id": frame.id, "ok": True, "body": frame.body}
    error = frame.error
    plain = {"code": error.code, "message": error.message, "retryable": error.retryable, "context": error.context}
    return {"id": frame.id, "ok": False, "error": plain}


def decode(line: bytes) -> Frame:
    """Raises FrameError with a sentence that may be shown to the other side."""
    if len(line) > MAX_LINE_BYTES:
        raise FrameError(f"a line of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}")
    try:
        value = json.loads(line)
    except ValueError as error:
        raise FrameError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FrameError("a frame is an object")
    try:
        return _decode(value)
    except (KeyError, TypeError) as error:
        raise FrameError(f"not a frame: {error}") from error


def _decode(value: dict[str, Any]) -> Frame:
    if "cancel" in value:
        return Cancel(cancel=_integer(value["cancel"]))
    if "event" in value:
        return Event(event=str(value["event"]), log=str(value["log"]), seq=_integer(value["seq"]), body=_object(value["body"]))
    if "verb" in value:
        return Request(
            id=_integer(value["id"]),
            verb=str(value["verb"]),
            deadline_ms=_integer(value["deadline_ms"]),
            body=_object(value.get("body", {})),
            traceparent=value.get("traceparent"),
        )
    if value["ok"]:
        return Answer(id=_integer(value["id"]), body=_object(value.get("body", {})))
    error = _object(value["error"])
    return Answer(
        id=_integer(value["id"]),
        error=AgentError(
            str(error["code"]), str(error["message"]), retryable=bool(error["retryable"]), **_object(error.get("context", {}))
        ),
    )


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a whole number, not {value!r}")
    return value


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, not {type(value).__name__}")
    return value
