"""The outermost ring, pure ASGI: request id, body limit, the last word on unexpected errors, request metrics.

The one rule: whatever happens inside, the client gets a problem with a request id, and the log has the same id.
"""

from __future__ import annotations

import logging
import re
import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.api import problems
from controlplane.api.errors import BodyTooLarge
from controlplane.api.standing import StreamCut
from controlplane.core.ids import Kind, new_id

_log = logging.getLogger("bedplate.api.request")
_UNBOUNDED = re.compile(r"/v1/images/[^/]+/blobs/[0-9a-f]{64}")
"""Uploads: their operation bounds the body by the size that was announced for it."""
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9_-]{8,128}")


class Ring:
    """Wraps the application; `max_body_bytes` bounds every request body, declared or streamed."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, registry: CollectorRegistry) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._requests = Counter(
            "bedplate_api_requests", "Requests answered.", ["operation", "method", "status"], registry=registry
        )
        self._seconds = Histogram(
            "bedplate_api_request_seconds", "From request to the answer's first byte.", ["operation"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["bedplate.request_id"] = request_id
        began = time.monotonic()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = _finished(scope, message["headers"], request_id)
                self._seconds.labels(_operation(scope)).observe(time.monotonic() - began)
            await send(message)

        try:
            await self._guarded(scope, receive, answer)
        except StreamCut as cut:
            _log.info("request %s was cut: %s", request_id, cut)
        except Exception as error:  # the one place where everything ends
            if status:
                _log.exception("request %s failed after its answer began", request_id)
                raise
            await problems.render(problems.translate(error), request_id)(scope, receive, answer)
        finally:
            self._requests.labels(_operation(scope), scope["method"], str(status)).inc()
            took = (time.monotonic() - began) * 1000
            _log.info("%s %s %d %.1f ms %s", scope["method"], scope["path"], status, took, request_id)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "PUT" and _UNBOUNDED.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        too_large = BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")
        if _declared_length(scope) > self._max_body_bytes:
            await problems.render(too_large, scope["bedplate.request_id"], {"connection": "close"})(scope, receive, send)
            return
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > self._max_body_bytes:
                    raise too_large
            return message

        await self._app(scope, limited, send)


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _without(headers: list[tuple[bytes, bytes]], name: bytes) -> list[tuple[bytes, bytes]]:
    return [pair for pair in headers if pair[0].lower() != name]


def _finished(scope: Scope, headers: list[tuple[bytes, bytes]], request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers of every answer: the request id, and that nobody in between keeps what may be a tenant's or a secret."""
    finished = [*_without(headers, b"x-request-id"), (b"x-request-id", request_id.encode())]
    finished.append((b"x-content-type-options", b"nosniff"))
    if scope["path"].startswith("/v1/") and not any(name.lower() == b"cache-control" for name, _ in headers):
        finished.append((b"cache-control", b"private, no-cache" if scope["method"] == "GET" else b"no-store"))
    return finished


def _request_id(scope: Scope) -> str:
    """The client's own `x-request-id` when it is harmless, else a fresh one."""
    given = (_header(scope, b"x-request-id") or b"").decode("latin-1")
    return given if _ACCEPTED_ID.fullmatch(given) else new_id(Kind.REQUEST)


def _declared_length(scope: Scope) -> int:
    value = _header(scope, b"content-length") or b"0"
    return int(value) if value.isdigit() else 0


def _operation(scope: Scope) -> str:
    """The operation id, so that metrics never carry ids of tenants."""
    return getattr(scope.get("route"), "operation_id", None) or "none"
