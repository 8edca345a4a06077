"""A small client of our own REST API, for programs that show or check a whole deployment."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

Json = dict[str, Any]
_CHAT_SECONDS = 120.0
_NOT_YET = (401, 404, 503)  # the gateway hears of a new key, route or replica within a second or two


class ApiFailed(RuntimeError):
    """The API refused, or something did not get where it should; the message says what the API said."""


class Api:
    """JSON in, JSON out, with the operator's token."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self._client = httpx2.AsyncClient(
            base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=httpx2.Timeout(60), trust_env=False
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def call(self, method: str, path: str, body: Json | None = None, *, missing_ok: bool = False) -> Json:
        """One request; {} for an answer without a body, or 404 when that is fine. Raises ApiFailed."""
        try:
            response = await self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise ApiFailed(f"{method} {path}: {type(error).__name__}: {error}") from error
        if response.status_code == 404 and missing_ok:
            return {}
        if response.is_error:
            raise ApiFailed(f"{method} {path}: {_problem(response)}")
        return response.json() if response.content else {}

    async def get(self, path: str) -> Json:
        return await self.call("GET", path)

    async def post(self, path: str, body: Json | None = None) -> Json:
        return await self.call("POST", path, body or {})

    async def until(
        self, path: str, is_done: Callable[[Json], bool], *, seconds: float, tell: Callable[[Json], None] | None = None
    ) -> Json:
        """Look at `path` until it is as wanted; raises ApiFailed with the last look when the time is over."""
        deadline = time.monotonic() + seconds
        while True:
            seen = await self.get(path)
            if is_done(seen):
                return seen
            if tell is not None:
                tell(seen)
            if time.monotonic() > deadline:
                raise ApiFailed(f"{path} is not there after {seconds:.0f} s: {_state(seen)}")
            await asyncio.sleep(0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    text: str
    tokens: int
    first_token_seconds: float


async def chat(url: str, key: str, body: Json, *, tell: Callable[[str], None]) -> Answer:
    """One streamed chat completion; `tell` gets the text as it grows. Raises ApiFailed; a route made just now gets time."""
    deadline = time.monotonic() + _CHAT_SECONDS
    async with httpx2.AsyncClient(timeout=httpx2.Timeout(_CHAT_SECONDS), trust_env=False) as client:
        while True:
            began = time.monotonic()
            try:
                async with client.stream("POST", url, json=body, headers={"authorization": f"Bearer {key}"}) as response:
                    if response.status_code == 200:
                        return await _read_answer(response, began, tell)
                    refused = f"{response.status_code} {(await response.aread()).decode(errors='replace')[:500]}"
            except httpx2.HTTPError as error:
                raise ApiFailed(f"{url}: {type(error).__name__}: {error}") from error
            if response.status_code not in _NOT_YET or time.monotonic() > deadline:
                raise ApiFailed(f"{url}: {refused}")
            await asyncio.sleep(0.25)


async def _read_answer(response: httpx2.Response, began: float, tell: Callable[[str], None]) -> Answer:
    """Server-sent events of the OpenAI form, to the end."""
    text, tokens, first = "", 0, 0.0
    async for line in response.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise ApiFailed(f"the answer broke off: {event['error']}")
        for choice in event.get("choices", []):
            if part := choice.get("delta", {}).get("content"):
                first = first or time.monotonic() - began
                text += part
                tell(text)
        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    if not text:
        raise ApiFailed("the model answered nothing")
    return Answer(text=text.strip(), tokens=tokens, first_token_seconds=first)


def _problem(response: httpx2.Response) -> str:
    """What a problem document says, in one line."""
    try:
        told = response.json()
        fields = "".join(f"; {error['pointer']}: {error['detail']}" for error in told["errors"])
        return f"{response.status_code} {told['code']}: {told['detail']}{fields} ({told['request_id']})"
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.text[:500]}"


def _state(seen: Json) -> str:
    """What a person needs of a resource that did not get there."""
    told = {name: seen[name] for name in ("state", "status", "progress", "report") if seen.get(name)}
    told["conditions"] = [
        f"{entry.get('type')}={entry.get('status')} {entry.get('reason')}: {entry.get('message')}"
        for entry in seen.get("conditions", [])
    ]
    return "; ".join(f"{name}: {value}" for name, value in told.items())
