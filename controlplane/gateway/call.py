"""One request as the gateway knows it while it answers: who asks, for what, since when, and the headers every answer has."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.core.ids import Kind, new_id
from controlplane.gateway.budget import Held
from controlplane.gateway.directory import KeyEntry
from controlplane.gateway.family import FAMILIES, OTHER, Family
from controlplane.gateway.limit import NO_KEY_HEADERS, Buckets
from controlplane.gateway.metrics import UNKNOWN
from controlplane.gateway.problem import Problem

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass(slots=True, kw_only=True)
class Call:
    """`model` is the public name once it is known to exist; until then metrics say `unknown`. `is_whole`: the answer that has
    begun is no stream of events.
    """

    path: str
    request_headers: list[Header]
    request_id: bytes
    send: Send
    client_address: str = ""
    arrived: float = field(default_factory=time.monotonic)
    key: KeyEntry | None = None
    buckets: Buckets | None = None
    held: Held | None = None
    model: str = UNKNOWN
    served_by: bytes = b"gateway"
    attempts: int = 0
    decision: bytes = b""
    authenticated_at: float | None = None
    chosen_at: float | None = None
    status: int = 0
    is_started: bool = False
    is_whole: bool = False
    is_client_gone: bool = False

    @property
    def family(self) -> Family:
        return FAMILIES.get(self.path, OTHER)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a request header (names are lower case in ASGI)."""
        return next((value for key, value in self.request_headers if key == name), None)

    def decide(self, route: str, target: str, rule: str) -> None:
        """Remember where the request goes, for engine, client, log and usage: `route/target/rule`."""
        self.decision = f"{route}/{target}/{rule}".encode("latin-1", "replace")

    def answer_headers(self) -> list[Header]:
        """What every answer carries, error or not (inference interfaces, section 4)."""
        now = time.monotonic()
        timing = b"auth;dur=%.1f" % (1000 * ((self.authenticated_at or now) - self.arrived))
        queued = 0.0
        if self.chosen_at is not None:
            queued = 1000 * (self.chosen_at - (self.authenticated_at or self.arrived))
            timing += b", queue;dur=%.1f, ttft;dur=%.1f" % (queued, 1000 * (now - self.chosen_at))
        return [
            (b"x-request-id", self.request_id),
            *(self.buckets.headers(now) if self.buckets else NO_KEY_HEADERS),
            (b"openai-processing-ms", b"%d" % (1000 * (now - self.arrived))),
            (b"x-served-by", self.served_by),
            (b"x-route-attempts", b"%d" % self.attempts),
            *(((b"x-bedplate-budget", b"soft"),) if self.held and self.held.is_soft else ()),
            *(((b"x-bedplate-route", self.decision),) if self.decision else ()),
            (b"x-queue-ms", b"%d" % queued),
            (b"server-timing", timing),
        ]

    async def start(self, status: int, headers: list[Header]) -> None:
        self.status, self.is_started = status, True
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *self.answer_headers()]})

    async def body(self, data: bytes, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, status: int, headers: list[Header], data: bytes) -> None:
        """A whole answer at once."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(data))])
        await self.body(data, more=False)

    async def fail(self, failure: Problem) -> None:
        """Answer with an error; in a stream that has begun, an error event without `[DONE]`."""
        if self.is_started:
            self.status = failure.status
            if self.is_whole:  # no place for words: it ends too early, and the connection with it
                return
            await self.body(self.family.error_event(failure), more=False)
        else:
            headers = [(b"content-type", b"application/json"), *failure.headers]
            await self.answer(failure.status, headers, self.family.error_body(failure))


def request_id_of(headers: list[Header]) -> bytes:
    """The client's own when it has up to 128 printable characters, else a fresh one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return new_id(Kind.REQUEST).encode()
