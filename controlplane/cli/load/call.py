"""One streamed call and when its tokens came.

The one rule: any non-empty field of a delta but the role is a token event; a stream without `[DONE]` has failed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(slots=True, kw_only=True)
class Called:
    """Seconds on the monotonic clock. `tokens` is what the server says it generated, else the token events."""

    began: float
    ended: float = 0.0
    first: float | None = None
    last: float | None = None
    gaps: list[float] = field(default_factory=list)
    events: int = 0
    prompt_tokens: int | None = None
    tokens: int | None = None
    error: str = ""

    @property
    def completion_tokens(self) -> int:
        return self.events if self.tokens is None else self.tokens

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.began

    @property
    def tpot(self) -> float | None:
        """Seconds a token while decoding: from the first token to the last, without the first."""
        if self.first is None or self.last is None or self.completion_tokens < 2:
            return None
        return (self.last - self.first) / (self.completion_tokens - 1)


async def call(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> Called:
    """Never raises but for cancellation: what went wrong stands in `error`."""
    called = Called(began=time.monotonic())
    try:
        async with session.post(url, data=body, headers=headers) as answer:
            if answer.status != 200:
                called.error = f"HTTP {answer.status}: {_words(await answer.read())}"
            else:
                await _listen(called, answer)
    except TimeoutError:
        called.error = "timed out"
    except aiohttp.ClientError as error:
        called.error = f"{type(error).__name__}: {error}"
    called.ended = time.monotonic()
    return called


async def _listen(called: Called, answer: aiohttp.ClientResponse) -> None:
    is_done = False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            is_done = True
            continue
        try:
            chunk = json.loads(payload)
        except ValueError:
            called.error = f"an event is not JSON: {payload[:80]!r}"
            return
        _take(called, chunk, time.monotonic())
    if not is_done and not called.error:
        called.error = "the stream ended without [DONE]"


def _take(called: Called, chunk: Any, now: float) -> None:
    if chunk.get("error"):
        called.error = str(chunk["error"].get("message", chunk["error"]))
    usage = chunk.get("usage")
    if usage:
        called.prompt_tokens, called.tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not any(_is_token(choice) for choice in chunk.get("choices") or ()):
        return
    if called.first is None:
        called.first = now
    elif called.last is not None:
        called.gaps.append(now - called.last)
    called.last = now
    called.events += 1


def _is_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(value for name, value in delta.items() if name != "role") or bool(choice.get("text"))


def _words(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
