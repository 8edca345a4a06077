"""A stream of server-sent events on its way through: forwarded byte for byte, counted, its usage read.

The one rule: what leaves is a concatenation of whole events exactly as they came; only usage that the client did not ask
for is taken out. Comments and unknown fields pass. (Event syntax: WHATWG HTML, section 9.2.6.)
"""

from __future__ import annotations

import re
from enum import Enum, auto

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.gateway.family import Reader, Tokens

_END = re.compile(rb"\r?\n\r?\n")
_USAGE = re.compile(rb'(,\s*)?"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*\})*\}(\s*,)?')
_HOLD_BYTES = 1 << 16


class UsageForm(Enum):
    """What a client gets to see of `usage`."""

    VERBATIM = auto()
    """As the engine sends it: it was asked to by the client itself."""
    AT_END = auto()
    """The client asked for the last chunk only, we for running totals: null before the last."""
    NONE = auto()
    """The client asked for nothing: no running totals, no usage-only chunk."""


class EventStream:
    """Feed it what arrives, send what it returns."""

    def __init__(self, form: UsageForm, *, is_running_total: bool, reader: Reader | None = None) -> None:
        self._form = form
        self._reader = reader
        self._is_running_total = is_running_total
        self._tail = b""
        self._is_passing_long_event = False
        self.tokens = Tokens()
        self.is_done = False
        self.has_tokens = False

    def feed(self, data: bytes) -> bytes:
        """The whole events in what has arrived; the rest waits for its end."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        parts: list[bytes] = []
        start = 0
        for match in _END.finditer(data):
            end = match.end()
            if self._is_passing_long_event:
                self._is_passing_long_event = False
                parts.append(data[start:end])
            else:
                parts.append(self._event(data[start:end]))
            start = end
        if start < len(data):
            parts.append(self._keep(data[start:]))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def rest(self) -> bytes:
        """What came after the last whole event, for the end of a stream that is done."""
        rest, self._tail = self._tail, b""
        return rest

    def _keep(self, rest: bytes) -> bytes:
        """Hold an event that has not ended, but not a comment line and not one too long to be a usage chunk."""
        if self._is_passing_long_event or len(rest) > _HOLD_BYTES or _is_comment(rest):
            self._is_passing_long_event = len(rest) > _HOLD_BYTES or self._is_passing_long_event
            return rest
        self._tail = rest
        return b""

    def _event(self, event: bytes) -> bytes:
        if event[0] in b"\r\n":  # the end of a comment whose line went out already
            bare = event.lstrip(b"\r\n")
            return event[: len(event) - len(bare)] + (self._event(bare) if bare else b"")
        payload = _payload(event)
        if payload is None:
            return event
        if payload == b"[DONE]":
            self.is_done = True
            return event
        try:
            chunk = json.loads(payload)
        except ValueError:
            return event
        if not isinstance(chunk, dict):
            return event
        if self._reader is None:
            return self._chunk(event, chunk)
        heard = self._reader(chunk, self.tokens)
        self.has_tokens |= heard.is_token
        self.is_done |= heard.is_done
        return event

    def _chunk(self, event: bytes, chunk: JsonObject) -> bytes:
        choices = chunk.get("choices")
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.tokens.read(usage)
        if choices and isinstance(choices, list):
            if any(isinstance(choice, dict) and _has_token(choice) for choice in choices):
                self.has_tokens = True
                if not isinstance(usage, dict):
                    self.tokens.count()
            if isinstance(usage, dict) and self._is_running_total and self._form is not UsageForm.VERBATIM:
                return _without_usage(event, chunk, b"null" if self._form is UsageForm.AT_END else None)
        elif isinstance(usage, dict) and choices == [] and self._form is UsageForm.NONE:
            return b""
        return event


def _is_comment(rest: bytes) -> bool:
    """Whether these are whole comment lines and nothing else."""
    return rest[:1] == b":" and rest[-1:] == b"\n" and b"\ndata" not in rest


def _payload(event: bytes) -> bytes | None:
    """The event's data; None for comments and events without data."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].strip()
    lines = [line.rstrip(b"\r") for line in event.split(b"\n")]
    data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    return b"\n".join(data).strip() if data else None


def _has_token(choice: JsonObject) -> bool:
    """Any non-empty field but the role: content, reasoning, tool calls, what engines invent next."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _without_usage(event: bytes, chunk: JsonObject, instead: bytes | None) -> bytes:
    """The event with its running total cut out (or null), every other byte as it was."""
    wanted = dict(chunk)
    if instead is None:
        del wanted["usage"]
    else:
        wanted["usage"] = None
    for match in _USAGE.finditer(event):
        if instead is not None:
            middle = (match[1] or b"") + b'"usage":' + instead + (match[2] or b"")
        else:
            middle = b"," if match[1] and match[2] else b""
        edited = event[: match.start()] + middle + event[match.end() :]
        payload = _payload(edited)
        try:
            if payload is not None and json.loads(payload) == wanted:
                return edited
        except ValueError:
            continue
    return b"data: " + json.dumps(wanted) + b"\n\n"
