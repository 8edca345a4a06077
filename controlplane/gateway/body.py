"""The request body: read within its limit, understood, and changed only where it must be, byte for byte.

The one rule: bytes that need no change are the client's own bytes; nothing is parsed and written anew.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.gateway import problem

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\],:]', re.DOTALL)
_SPACE = b" \t\r\n"
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the client asked for, as far as the gateway cares."""

    model: str
    is_stream: bool
    wants_usage: bool
    wants_continuous_usage: bool
    stream_options: JsonObject | None
    max_tokens: int | None


def understand(body: bytes) -> Asked:
    """Raises Problem 400 for anything but a JSON object with a model."""
    try:
        document = json.loads(body)
    except ValueError as error:
        raise problem.bad_request(f"The request body is not valid JSON: {error}.") from error
    if not isinstance(document, dict):
        raise problem.bad_request("The request body must be a JSON object.")
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise problem.bad_request("You must provide a model parameter.", param="model")
    options = document.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise problem.bad_request("stream_options must be an object.", param="stream_options")
    extra = document.get("ext_params")
    if isinstance(extra, dict):
        for name in ("stream", "stream_options"):
            if name in extra:
                raise problem.bad_request(f"{name} is not for ext_params: put it into the request itself.", param="ext_params")
        document = {**extra, **document}
    limit = next((document[name] for name in _LIMITS if document.get(name) is not None), None)
    return Asked(
        model=model,
        is_stream=document.get("stream") is True,
        wants_usage=bool(options and options.get("include_usage")),
        wants_continuous_usage=bool(options and options.get("continuous_usage_stats")),
        stream_options=options,
        max_tokens=limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None,
    )


def prepare(body: bytes, asked: Asked, *, served_model_id: str, has_continuous_usage: bool, asks_for_usage: bool) -> bytes:
    """The body for the replica: its own model id, and usage at the end of a stream, asked or not."""
    if asked.model != served_model_id:
        body = replace_member(body, "model", json.dumps(served_model_id))
    if not asks_for_usage:
        return body
    options: JsonObject = {**(asked.stream_options or {}), "include_usage": True}
    if has_continuous_usage:
        options["continuous_usage_stats"] = True
    if options == asked.stream_options:
        return body
    if asked.stream_options is None and b'"stream_options"' not in body:
        start = body.index(b"{") + 1
        return body[:start] + b'"stream_options":' + json.dumps(options) + b"," + body[start:]
    return replace_member(body, "stream_options", json.dumps(options))


def replace_member(body: bytes, name: str, value: bytes) -> bytes:
    """`body` with the value of every top-level member `name` replaced; added in front when there is none."""
    spans = [span for key, span in _members(body) if key == name]
    if not spans:
        start = body.index(b"{") + 1
        return body[:start] + json.dumps(name) + b":" + value + b"," + body[start:]
    for start, end in reversed(spans):
        body = body[:start] + value + body[end:]
    return body


def remove_member(body: bytes, name: str) -> bytes:
    """`body` without its top-level members `name`, and their commas."""
    while True:
        members = _members(body)
        number = next((index for index, (key, _) in enumerate(members) if key == name), None)
        if number is None:
            return body
        end = members[number][1][1]
        if number + 1 < len(members):  # up to the next name
            after = body.index(b'"', body.index(b",", end))
            before = body.index(b'"', members[number - 1][1][1] if number else body.index(b"{"))
            body = body[:before] + body[after:]
        else:
            start = members[number - 1][1][1] if number else body.index(b"{") + 1
            body = body[:start] + body[end:]


def _members(body: bytes) -> list[tuple[str, tuple[int, int]]]:
    """Name and value span of every member of the object `body`, which is known to be valid JSON."""
    members: list[tuple[str, tuple[int, int]]] = []
    depth = 0
    key, value_start = "", -1
    for match in _TOKEN.finditer(body):
        first = body[match.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}],":
            if depth == 1 and value_start >= 0:
                members.append((key, _trim(body, value_start, match.start())))
                value_start = -1
            if first != ord(","):
                depth -= 1
        elif depth == 1 and value_start < 0:
            if first == ord(":"):
                value_start = match.end()
            else:
                key = str(json.loads(match.group()))
    return members


def _trim(body: bytes, start: int, end: int) -> tuple[int, int]:
    while body[start] in _SPACE:
        start += 1
    while body[end - 1] in _SPACE:
        end -= 1
    return start, end
