"""The kinds of calls that go to engines: how each streams, ends, and says what it used.

The one rule: a family only reads. Bytes of every family pass unchanged; only OpenAI's chat and completions have usage that may
have to be asked for and taken out again (`stream`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.gateway.problem import Problem

_MOST_TOKENS = 1 << 31  # what says more is a mistake, or an attack on the sums


def is_count(value: object) -> TypeGuard[int]:
    """Whether an engine's figure can be one: some answer nonsense, and one record that does not fit stops all that follow."""
    return type(value) is int and 0 <= value <= _MOST_TOKENS


def _count(value: object) -> int:
    return value if is_count(value) else 0


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Counts so far. `is_exact`: they are the engine's own, not ours by counting chunks."""

    prompt: int | None = None
    completion: int = 0
    cached: int = 0
    is_exact: bool = False

    def read(self, usage: JsonObject) -> None:
        """Take over the engine's figures, in OpenAI's or Anthropic's words; what is no whole number is left alone."""
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
        if not is_count(prompt) or not is_count(completion):
            return
        details = usage.get("prompt_tokens_details", usage.get("input_tokens_details"))
        if isinstance(details, dict):
            cached = _count(details.get("cached_tokens"))
        else:  # Anthropic counts what the cache gave and took beside its input tokens
            cached = _count(usage.get("cache_read_input_tokens"))
            prompt += cached + _count(usage.get("cache_creation_input_tokens"))
        self.prompt, self.completion, self.is_exact = prompt, completion, True
        self.cached = min(cached, prompt)

    def count(self) -> None:
        """One more token that nobody but us has counted."""
        self.completion += 1
        self.is_exact = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one event of a stream said."""

    is_token: bool = False
    is_done: bool = False


Reader = Callable[[JsonObject, Tokens], Heard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`has_stream_options`: usage is asked for by the request. `reader` None: events are OpenAI's chunks, ended by `[DONE]`.

    `is_form`: multipart bodies are taken. `is_media`: answers flow on as they come, and one that was cut is not billed.
    """

    modality: str
    has_completion: bool = True
    is_streamed: bool = True
    has_stream_options: bool = False
    reader: Reader | None = None
    is_form: bool = False
    is_media: bool = False
    shape: str = "openai"

    def error_body(self, failure: Problem) -> bytes:
        """The error as an answer; Anthropic's SDKs look for a `type` beside `error`."""
        return failure.body() if self.shape != "messages" else json.dumps({"type": "error", **failure.document()})

    def error_event(self, failure: Problem) -> bytes:
        """The error as the last event of a stream that has begun."""
        name = b"" if self.shape == "openai" else b"event: error\n"
        return name + b"data: " + self.error_body(failure) + b"\n\n"


def read_messages(event: JsonObject, tokens: Tokens) -> Heard:
    """Anthropic's events: input tokens come first, output tokens as running totals, `message_stop` ends."""
    kind = event.get("type")
    if kind == "message_start":
        message = event.get("message")
        usage = message.get("usage") if isinstance(message, dict) else None
        if isinstance(usage, dict):
            tokens.read(usage)
            tokens.completion = 0
    elif kind == "content_block_delta":
        tokens.count()
        return Heard(is_token=True)
    elif kind == "message_delta":
        usage = event.get("usage")
        output = usage.get("output_tokens") if isinstance(usage, dict) else None
        if is_count(output):
            tokens.completion, tokens.is_exact = output, tokens.prompt is not None
    return Heard(is_done=kind == "message_stop")


def read_response(event: JsonObject, tokens: Tokens) -> Heard:
    """Events of `/v1/responses`: deltas of any kind are tokens, the last event carries the whole response with its usage."""
    kind = str(event.get("type", ""))
    if kind.endswith(".delta"):
        tokens.count()
        return Heard(is_token=True)
    is_done = kind in ("response.completed", "response.incomplete", "response.failed")
    if is_done:
        response = event.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        if isinstance(usage, dict):
            tokens.read(usage)
    return Heard(is_done=is_done)


def read_media(event: JsonObject, tokens: Tokens) -> Heard:
    """Events of transcriptions, speech and images: deltas, then one that is `.done` or `.completed`, perhaps with usage."""
    kind = str(event.get("type", ""))
    usage = event.get("usage")
    if isinstance(usage, dict):
        tokens.read(usage)
    return Heard(is_token=kind.endswith(".delta"), is_done=kind.endswith((".done", ".completed")))


_AUDIO = Family(modality="audio", has_completion=False, reader=read_media, is_media=True, shape="media")
_IMAGE = replace(_AUDIO, modality="image")

FAMILIES: dict[str, Family] = {
    "/v1/chat/completions": Family(modality="chat", has_stream_options=True),
    "/v1/completions": Family(modality="completion", has_stream_options=True),
    "/v1/embeddings": Family(modality="embedding", has_completion=False, is_streamed=False),
    "/v1/rerank": Family(modality="rerank", has_completion=False, is_streamed=False),
    "/v1/messages": Family(modality="chat", reader=read_messages, shape="messages"),
    "/v1/responses": Family(modality="chat", reader=read_response, shape="responses"),
    "/v1/audio/speech": _AUDIO,
    "/v1/audio/transcriptions": replace(_AUDIO, is_form=True),
    "/v1/audio/translations": replace(_AUDIO, is_form=True),
    "/v1/images/generations": _IMAGE,
    "/v1/images/edits": replace(_IMAGE, is_form=True),
    "/v1/images/variations": replace(_IMAGE, is_form=True),
}
OTHER = Family(modality="")
