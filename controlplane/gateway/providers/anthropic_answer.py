"""Answers of the Messages API in the form of OpenAI's chat: whole, refused, and event by event."""

from __future__ import annotations

import time

from controlplane.core import json
from controlplane.core.json import Json, JsonObject
from controlplane.gateway.family import Heard, Tokens, read_messages
from controlplane.gateway.providers import Events
from controlplane.gateway.stream import EventStream, UsageForm

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}


class AsChat:
    def __init__(self, *, has_usage: bool) -> None:
        self._has_usage = has_usage

    def whole(self, body: bytes) -> bytes:
        document = _object(json.loads(body))
        text: list[str] = []
        reasoning: list[str] = []
        calls: list[Json] = []
        for block in map(_object, _list(document.get("content"))):
            if block.get("type") == "text":
                text.append(str(block.get("text", "")))
            elif block.get("type") == "thinking":
                reasoning.append(str(block.get("thinking", "")))
            elif block.get("type") == "tool_use":
                function: JsonObject = {"name": block.get("name"), "arguments": json.dumps(block.get("input")).decode()}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
        message: JsonObject = {"role": "assistant", "content": "".join(text) if text or not calls else None}
        message |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        tokens = Tokens()
        tokens.read(_object(document.get("usage")))
        finish = _FINISH.get(str(document.get("stop_reason")), "stop")
        return json.dumps(
            {
                "id": document.get("id"),
                "object": "chat.completion",
                "created": int(time.time()),
                "model": document.get("model"),
                "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}],
                "usage": usage_of(tokens),
            }
        )

    def refusal(self, body: bytes) -> bytes:
        try:
            error = _object(_object(json.loads(body)).get("error"))
        except ValueError:
            error = {}
        message = error.get("message") or "The provider refused this request."
        return json.dumps({"error": {"message": message, "type": error.get("type"), "param": None, "code": None}})

    def events(self) -> Events:
        return ChatEvents(has_usage=self._has_usage)


class ChatEvents:
    """Feed it Anthropic's events, send the chunks that it returns."""

    def __init__(self, *, has_usage: bool) -> None:
        self._has_usage = has_usage
        self._inner = EventStream(UsageForm.VERBATIM, is_running_total=False, reader=self._read)
        self._out: list[bytes] = []
        self._head: JsonObject = {"id": "", "object": "chat.completion.chunk", "created": int(time.time()), "model": ""}
        self._calls = -1

    @property
    def tokens(self) -> Tokens:
        return self._inner.tokens

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    @property
    def has_tokens(self) -> bool:
        return self._inner.has_tokens

    def feed(self, data: bytes) -> bytes:
        self._inner.feed(data)
        out, self._out = b"".join(self._out), []
        return out

    def rest(self) -> bytes:
        return b""

    def _read(self, event: JsonObject, tokens: Tokens) -> Heard:
        heard = read_messages(event, tokens)
        kind = event.get("type")
        if kind == "message_start":
            message = _object(event.get("message"))
            self._head |= {"id": message.get("id"), "model": message.get("model")}
            self._chunk({"role": "assistant", "content": ""})
        elif kind == "content_block_start":
            self._start(_object(event.get("content_block")))
        elif kind == "content_block_delta":
            self._delta(_object(event.get("delta")))
        elif kind == "message_delta":
            reason = _object(event.get("delta")).get("stop_reason")
            self._chunk({}, finish=_FINISH.get(str(reason), "stop"))
        elif kind == "ping":
            self._out.append(b": ping\n\n")
        elif kind == "error":
            self._out.append(b"data: " + json.dumps({"error": event.get("error")}) + b"\n\n")
        elif kind == "message_stop":
            if self._has_usage:
                self._say({**self._head, "choices": [], "usage": usage_of(tokens)})
            self._out.append(b"data: [DONE]\n\n")
        return heard

    def _start(self, block: JsonObject) -> None:
        if block.get("type") == "tool_use":
            self._calls += 1
            function: JsonObject = {"name": block.get("name"), "arguments": ""}
            self._chunk(
                {"tool_calls": [{"index": self._calls, "id": block.get("id"), "type": "function", "function": function}]}
            )

    def _delta(self, delta: JsonObject) -> None:
        if "text" in delta:
            self._chunk({"content": delta["text"]})
        elif "thinking" in delta:
            self._chunk({"reasoning_content": delta["thinking"]})
        elif "partial_json" in delta:
            self._chunk({"tool_calls": [{"index": self._calls, "function": {"arguments": delta["partial_json"]}}]})

    def _chunk(self, delta: JsonObject, *, finish: str | None = None) -> None:
        self._say({**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    def _say(self, document: JsonObject) -> None:
        self._out.append(b"data: " + json.dumps(document) + b"\n\n")


def usage_of(tokens: Tokens) -> JsonObject:
    prompt = tokens.prompt or 0
    details: JsonObject = {"cached_tokens": tokens.cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": tokens.completion,
        "total_tokens": prompt + tokens.completion,
        "prompt_tokens_details": details,
    }


def _object(value: Json) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []
