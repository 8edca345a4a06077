"""The ASGI application: OpenAI's paths, keys, models, errors in one shape, and the client's leaving noticed in every phase.

The one rule: nothing stands between uvicorn and this: `receive()` is raced against the work itself, and the work is cancelled
when the client has gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from controlplane.core import json
from controlplane.gateway import problem
from controlplane.gateway.body import Asked, understand
from controlplane.gateway.call import Call, Receive, Scope, Send, request_id_of
from controlplane.gateway.directory import KeyEntry, RouteEntry
from controlplane.gateway.exchange import Exchange, Means
from controlplane.gateway.family import FAMILIES
from controlplane.gateway.keeper import Keeper
from controlplane.gateway.problem import Problem
from controlplane.gateway.question import Question
from controlplane.gateway.upload import Upload

log = logging.getLogger(__name__)

KEY_PREFIX = b"bpk_"
_MODELS = "/v1/models"
_BODY_SECONDS = 60.0
_SLOW_BYTES = 1 << 20
_DEFAULT_MAX_TOKENS = 1024
_JSON = (b"content-type", b"application/json")


class ClientGone(Exception):
    """The client left before its request was whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    keeper: Keeper
    means: Means
    max_body_bytes: int
    max_upload_bytes: int
    spool: Path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the gateway speaks http, not {scope['type']}")
        headers = scope["headers"]
        client = (scope.get("client") or ("",))[0]
        call = Call(
            path=scope["path"],
            request_headers=headers,
            request_id=request_id_of(headers),
            send=send,
            client_address=client,
        )
        try:
            await self._answer(scope["method"], call, receive)
        except Problem as failure:
            await self._fail(call, failure)
        except ClientGone:
            call.status = 499
        except asyncio.CancelledError:
            if not call.is_client_gone:
                raise
            _forgive_cancellation()
            call.status = 499
        except Exception as error:
            log.exception("request %s failed", call.request_id.decode())
            await self._fail(call, problem.internal(repr(error)))
        finally:
            self.means.metrics.requests.labels(call.model, str(call.status)).inc()

    async def _fail(self, call: Call, failure: Problem) -> None:
        if failure.log:
            log.warning("request %s: %d %s: %s", call.request_id.decode(), failure.status, failure.code, failure.log)
        await call.fail(failure)

    async def _answer(self, method: str, call: Call, receive: Receive) -> None:
        path = call.path
        if path in FAMILIES:
            if method != "POST":
                raise problem.method_not_allowed(method, "POST")
            return await self._proxy(call, receive)
        if path not in ("/healthz", "/metrics", _MODELS) and not path.startswith(f"{_MODELS}/"):
            raise problem.not_found(path)
        if method not in ("GET", "HEAD"):
            raise problem.method_not_allowed(method, "GET")
        if path == "/healthz":
            return await call.answer(200, [_JSON], json.dumps(self._health()))
        if path == "/metrics":
            return await call.answer(200, [(b"content-type", b"text/plain; version=0.0.4")], self._metrics())
        key = await self._authenticate(call)
        if path == _MODELS:
            data = [_model(route) for route in self.keeper.current.visible(key)]
            return await call.answer(200, [_JSON], json.dumps({"object": "list", "data": data}))
        route = await self._route(key, path.removeprefix(f"{_MODELS}/"))
        return await call.answer(200, [_JSON], json.dumps(_model(route)))

    def _health(self) -> dict[str, str]:
        return {"status": "ok", "database": "up" if self.keeper.is_connected else "away"}

    def _metrics(self) -> bytes:
        metrics = self.means.metrics
        metrics.inflight.set(self.means.router.in_flight)
        metrics.queue_depth.set(self.means.router.book.queued())
        metrics.database_up.set(self.keeper.is_connected)
        metrics.unlanded.set(self.means.journal.size_bytes())
        return metrics.render()

    async def _authenticate(self, call: Call) -> KeyEntry:
        """The key of this call; raises Problem 401, or 503 when the database is away and the key is not a known one."""
        scheme, _, secret = (call.header(b"authorization") or b"").partition(b" ")
        secret = secret.strip() if scheme.lower() == b"bearer" else (call.header(b"x-api-key") or b"").strip()
        if not secret:
            raise problem.invalid_key()
        key = self.keeper.current.key(secret)
        if key is None and secret.startswith(KEY_PREFIX):
            await self.keeper.recheck()
            key = self.keeper.current.key(secret)
            if key is None and not self.keeper.is_connected:
                raise problem.keys_unavailable()
        if key is None or not key.is_valid(time.time()):
            raise problem.invalid_key()
        if not key.may_come_from(call.client_address):
            raise problem.not_allowed("This key may not be used from your address.", "ip_not_allowed")
        if key.scopes is not None and call.family.modality and call.family.modality not in key.scopes:
            raise problem.not_allowed(f"This key is not for {call.family.modality} requests.", "permission_denied")
        call.key = key
        call.authenticated_at = time.monotonic()
        call.buckets = self.means.limiter.buckets(key, call.authenticated_at)
        return key

    async def _route(self, key: KeyEntry, name: str) -> RouteEntry:
        """The route of that name; one that was made a moment ago is found too."""
        route = self.keeper.current.route(key, name)
        if route is None and key.may_use(name):
            await self.keeper.recheck()
            route = self.keeper.current.route(key, name)
        if route is None:
            raise problem.model_not_found(name)
        return route

    async def _proxy(self, call: Call, receive: Receive) -> None:
        key = await self._authenticate(call)
        if call.family.is_form and (call.header(b"content-type") or b"").lower().startswith(b"multipart/form-data"):
            return await self._proxy_form(key, call, receive)
        body = await self._read(call, receive)
        return await self._exchange(key, call, receive, Question(asked=understand(body), body=body))

    async def _proxy_form(self, key: KeyEntry, call: Call, receive: Receive) -> None:
        upload = Upload(self.spool, call.header(b"content-type") or b"")
        try:
            await self._take(call, receive, upload.write, self.max_upload_bytes)
            await self._exchange(key, call, receive, Question(asked=upload.understand(), upload=upload))
        except OSError as error:
            raise problem.cannot_account(repr(error)) from error
        finally:
            upload.close()

    async def _exchange(self, key: KeyEntry, call: Call, receive: Receive, question: Question) -> None:
        asked = question.asked
        route = await self._route(key, asked.model)
        call.model = route.name
        reserved = question.prompt_estimate + _completion_limit(call, asked)
        limiter = self.means.limiter
        if route.name in key.model_limits:
            call.buckets = limiter.buckets(key, time.monotonic(), route.name)
        buckets = call.buckets
        assert buckets is not None
        if key.budget is not None:
            call.held = await self.means.budgets.hold(
                key, reserved, _most_cost(route, reserved, _completion_limit(call, asked))
            )
        try:
            await limiter.reserve(buckets, reserved)
        except Problem:
            if call.held is not None:
                call.held.settle(None, None)
            raise
        try:
            exchange = Exchange(self.means, call, route, question, reserved_tokens=reserved)
            await _unless_client_leaves(call, receive, exchange)
        finally:
            limiter.release(buckets)

    async def _read(self, call: Call, receive: Receive) -> bytes:
        """The whole body; raises Problem 413 or 408, or ClientGone."""
        parts: list[bytes] = []
        await self._take(call, receive, parts.append, self.max_body_bytes)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _take(self, call: Call, receive: Receive, write: Callable[[bytes], object], most_bytes: int) -> None:
        declared = call.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > most_bytes:
            raise problem.too_large(most_bytes)
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS) as limit:
                while True:
                    message = await receive()
                    if size > _SLOW_BYTES:  # a long upload may take long while it moves
                        limit.reschedule(asyncio.get_running_loop().time() + _BODY_SECONDS)
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > most_bytes:
                        raise problem.too_large(most_bytes)
                    write(part)
                    if not message.get("more_body", False):
                        return
        except TimeoutError as error:
            raise problem.body_timeout() from error


async def _unless_client_leaves(call: Call, receive: Receive, exchange: Exchange) -> None:
    """Run the exchange in this task and cancel it when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    is_over = False

    def leave(_: object) -> None:
        if not is_over:
            call.is_client_gone = True
            task.cancel()

    watch = asyncio.ensure_future(_wait_gone(receive))
    watch.add_done_callback(leave)
    try:
        await exchange.run()
    finally:
        is_over = True
        watch.cancel()


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _forgive_cancellation() -> None:
    task = asyncio.current_task()
    if task is not None:
        with suppress(ValueError):
            task.uncancel()


def _completion_limit(call: Call, asked: Asked) -> int:
    if not call.family.has_completion:
        return 0
    return asked.max_tokens or _DEFAULT_MAX_TOKENS


def _most_cost(route: RouteEntry, tokens: int, completion: int) -> int:
    """What the dearest target would cost, in millionths."""
    prices = [one.serving.price for one in route.every_target() if one.serving.price is not None]
    return max((price.of(tokens - completion, 0, completion) for price in prices), default=0)


def _model(route: RouteEntry) -> dict[str, object]:
    return {"id": route.name, "object": "model", "created": route.created, "owned_by": "bedplate", "meta": dict(route.meta)}
