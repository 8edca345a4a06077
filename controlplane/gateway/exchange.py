"""One request at a replica: connect, wait, pass the answer on byte for byte, account for it, let go.

The one rule: every way out (done, refused, died, timed out, client gone) passes `finally`, where the replica is let go, the
account is closed and the reservation settled. Another replica is tried only before the first byte has gone to the client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial

import aiohttp

from controlplane.core import json
from controlplane.gateway import problem
from controlplane.gateway.body import Asked, prepare
from controlplane.gateway.budget import Budgets
from controlplane.gateway.call import Call, Header
from controlplane.gateway.directory import Price, ReplicaEntry, RouteEntry, Target
from controlplane.gateway.limit import Limiter
from controlplane.gateway.meter import Meter
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.outside import outside
from controlplane.gateway.problem import Problem
from controlplane.gateway.providers import Answer, Events
from controlplane.gateway.question import Question
from controlplane.gateway.retry import Fault, FaultKind
from controlplane.gateway.routing import Router
from controlplane.gateway.search import Search
from controlplane.gateway.stream import EventStream, UsageForm
from controlplane.gateway.upstream import Letter, NotConnected, headers_for, send
from controlplane.metering.journal import Journal
from controlplane.metering.record import Outcome

log = logging.getLogger(__name__)

STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_SEND_AT_ONCE_BYTES = 1 << 20
_PARSE_BYTES = 32 << 20
_ERROR_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What exchanges share: made once by the process."""

    session: aiohttp.ClientSession
    router: Router
    limiter: Limiter
    budgets: Budgets
    journal: Journal
    metrics: Metrics


class Exchange:
    def __init__(self, means: Means, call: Call, route: RouteEntry, question: Question, *, reserved_tokens: int) -> None:
        self._means = means
        self._call = call
        self._route = route
        self._question = question
        self._asked = question.asked
        self._body = question.body
        self._reserved = reserved_tokens
        self._meter: Meter | None = None
        self._price: Price | None = None
        self._phase_name = "total"
        self._scope = asyncio.timeout(None)

    async def run(self) -> None:
        """Answer the call. Raises Problem; cancelled when the client has left."""
        try:
            await self._try_in_order()
        except Problem as failure:
            self._close(Outcome.TIMED_OUT if failure.type == "timeout_error" else self._outcome_of_failure(), failure.status)
            raise
        except asyncio.CancelledError:
            self._close(Outcome.CLIENT_CLOSED, 499)
            raise
        finally:
            self._close(Outcome.UPSTREAM_DIED, 500)
            self._settle()

    async def _try_in_order(self) -> None:
        """One replica after the other until one answers; what the last one met is what the client gets."""
        search = Search(self._means.router, self._call, self._route, self._body, is_stream=self._asked.is_stream)
        choice = await search.first()
        while True:
            self._call.decide(self._route.name, choice[0].name, search.rule)
            try:
                return await self._attempt(*choice)
            except Fault as fault:
                choice = await search.another(fault)

    def _outcome_of_failure(self) -> Outcome:
        return Outcome.UPSTREAM_DIED if self._meter is not None and self._meter.has_prefill else Outcome.REFUSED

    async def _attempt(self, target: Target, replica: ReplicaEntry) -> None:
        """Raises Fault when nothing went to the client yet and another replica may do better."""
        call, router = self._call, self._means.router
        call.attempts += 1
        call.chosen_at = time.monotonic()
        call.served_by = replica.short_id.encode()
        meter = self._open(target, replica)
        router.enter(target, replica, call.chosen_at)
        self._scope = asyncio.timeout(None)
        try:
            async with self._scope:
                await self._exchange(target, replica, meter)
            router.breakers.succeeded(replica.id)
            first = meter.first_token_at
            router.traffic.answered(target, replica, None if first is None else first - call.chosen_at)
        except Fault as fault:
            router.breakers.failed(replica.id, time.monotonic())
            if fault.kind is not FaultKind.BUSY:
                router.traffic.failed(target, replica)
            raise
        except Problem as failure:
            if failure.status >= 500:  # it died in the middle of its answer
                router.traffic.failed(target, replica)
            raise
        except TimeoutError as error:
            if not self._scope.expired():
                raise problem.upstream_error(f"{replica.base_url}: {error!r}") from error
            router.breakers.failed(replica.id, time.monotonic())
            router.traffic.failed(target, replica)
            limits = self._route.timeouts
            seconds = {"ttft": limits.first_token, "idle": limits.idle, "total": limits.total}[self._phase_name]
            raise problem.timed_out(self._phase_name, seconds) from error
        finally:
            router.breakers.undecided(replica.id)
            router.leave(target, replica, time.monotonic())

    async def _exchange(self, target: Target, replica: ReplicaEntry, meter: Meter) -> None:
        family = self._call.family
        is_metered_stream = self._asked.is_stream and family.is_streamed
        answer: Answer | None = None
        if target.provider is not None and self._question.upload is not None:
            raise problem.not_supported(self._route.name, "forms do not go to providers outside")
        if target.provider is not None:
            letter, answer = outside(target.provider, replica.serving.served_model_id, self._call, self._body)
        else:
            letter = self._letter(replica, is_metered=is_metered_stream)
        self._phase("ttft" if self._asked.is_stream else "total")
        try:
            response = await send(self._means.session, letter, connect_seconds=self._route.timeouts.connect)
        except NotConnected as error:
            raise Fault(
                FaultKind.UNREACHED, problem.upstream_error(f"cannot connect to {replica.base_url}: {error}")
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._cut(replica, error) from error
        try:
            if response.status != 200:
                await self._refused(response, replica, answer)
            elif is_metered_stream and response.content_type == "text/event-stream":
                await self._stream(response, replica, meter, self._events(replica, answer))
            else:
                await self._plain(response, replica, meter, answer)
        finally:
            response.close() if not response.content.is_eof() else response.release()

    def _letter(self, replica: ReplicaEntry, *, is_metered: bool) -> Letter:
        url, headers, upload = replica.base_url + self._call.path, headers_for(self._call), self._question.upload
        if upload is not None:
            model = replica.serving.served_model_id
            headers.append(("content-length", str(upload.length(model))))
            return Letter(url=url, headers=headers, pieces=partial(upload.pieces, model))
        body = prepare(
            self._body,
            self._asked,
            served_model_id=replica.serving.served_model_id,
            has_continuous_usage=replica.serving.has_continuous_usage,
            asks_for_usage=is_metered and self._call.family.has_stream_options,
        )
        return Letter(url=url, headers=headers, body=body)

    def _events(self, replica: ReplicaEntry, answer: Answer | None) -> Events:
        events = answer.events() if answer is not None else None
        form = _usage_form(self._asked)
        return events or EventStream(
            form, is_running_total=replica.serving.has_continuous_usage, reader=self._call.family.reader
        )

    def _cut(self, replica: ReplicaEntry, error: Exception) -> Exception:
        """The connection ended: another replica may take over unless the answer has begun to go out."""
        said = f"{replica.base_url}: {error!r}"
        if self._call.is_started:
            return problem.stream_interrupted(said)
        return Fault(FaultKind.CUT, problem.upstream_error(said))

    async def _refused(self, response: aiohttp.ClientResponse, replica: ReplicaEntry, answer: Answer | None) -> None:
        """Pass a 4xx on unchanged; keep the words of a 5xx in our log."""
        body = b""
        try:
            body = await response.content.read(_ERROR_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            raise self._cut(replica, error) from error
        said = f"{replica.base_url} answered {response.status}: {body[:500]!r}"
        if response.status == 503:
            raise Fault(FaultKind.BUSY, problem.overloaded(response.headers.get("retry-after", "").encode() or None, said))
        if response.status == 501:
            raise problem.not_supported(self._route.name, said)
        is_json = response.content_type == "application/json"
        is_ours = response.status in (401, 403, 407)
        if response.status in (404, 405) and self._call.path != "/v1/chat/completions" and not _names_model(body):
            raise problem.not_supported(self._route.name, said)
        is_ours |= response.status == 404 and not is_json  # no engine of this model
        if not 400 <= response.status < 500 or is_ours:
            raise Fault(FaultKind.FAILED, problem.upstream_error(said))
        if not is_json:
            raise problem.engine_refused(response.status, body)
        await self._pass_refusal(response, body if answer is None else answer.refusal(body))

    async def _pass_refusal(self, response: aiohttp.ClientResponse, body: bytes) -> None:
        headers: list[Header] = [(b"content-type", b"application/json")]
        headers += [
            (name, response.headers[name.decode()].encode())
            for name in (b"retry-after", b"retry-after-ms")
            if name.decode() in response.headers
        ]
        if response.status not in (408, 409, 429):
            headers.append((b"x-should-retry", b"false"))
        self._close(Outcome.REFUSED, response.status)
        await self._call.answer(response.status, headers, body)

    async def _plain(
        self, response: aiohttp.ClientResponse, replica: ReplicaEntry, meter: Meter, answer: Answer | None
    ) -> None:
        """A whole answer. Up to 1 MiB it goes out at once; a larger one flows, its last part after the account is closed."""
        call = self._call
        kind = response.headers.get("content-type", "application/json").encode()
        parts: list[bytes] = []
        size = 0
        last = b""
        flows = call.family.is_media and not kind.startswith(b"application/json")
        meter.has_prefill = True
        try:
            while data := await response.content.readany():
                size += len(data)
                if size <= _PARSE_BYTES:
                    parts.append(data)
                if not call.is_started and answer is None and (size > _SEND_AT_ONCE_BYTES or flows):
                    call.is_whole = True
                    length = [(b"content-length", str(response.content_length).encode())] if response.content_length else []
                    await call.start(200, [(b"content-type", kind), *length])
                    last, data = b"".join(parts[:-1]), parts[-1] if parts else data
                if call.is_started:
                    kept = 1 if flows else len(data)  # something is held back until the account is closed
                    await call.body(last + data[:-kept], more=True)
                    last = data[-kept:]
        except (aiohttp.ClientError, OSError) as error:
            raise self._cut(replica, error) from error
        whole = b"".join(parts)
        whole = whole if answer is None else self._translated(answer, whole, replica)
        _read_usage(meter, whole if size <= _PARSE_BYTES else b"")
        self._close(Outcome.COMPLETED, 200)
        if call.is_started:
            await call.body(last, more=False)
        else:
            await call.answer(200, [(b"content-type", kind)], whole)

    def _translated(self, answer: Answer, whole: bytes, replica: ReplicaEntry) -> bytes:
        try:
            return answer.whole(whole)
        except ValueError as error:
            raise problem.upstream_error(f"{replica.base_url} answered what cannot be read: {whole[:200]!r}") from error

    async def _stream(self, response: aiohttp.ClientResponse, replica: ReplicaEntry, meter: Meter, events: Events) -> None:
        """Pass events on as they come. The status goes out with the first of them, so that an early death keeps its code."""
        call = self._call
        meter.tokens = events.tokens
        meter.has_prefill = True
        while data := await self._next(response, replica):
            ready = events.feed(data)
            now = time.monotonic()
            if events.has_tokens and meter.first_token_at is None:
                meter.first_token_at = now
            if events.is_done:
                self._close(Outcome.COMPLETED, 200)
            else:
                meter.progress(now)
            if ready:
                if not call.is_started:
                    await call.start(200, [*STREAM_HEADERS])
                await call.body(ready, more=True)
            self._phase("idle" if call.is_started else "ttft")
        if not events.is_done:
            raise self._cut(replica, ConnectionError("ended the stream without [DONE]"))
        await call.body(events.rest(), more=False)

    async def _next(self, response: aiohttp.ClientResponse, replica: ReplicaEntry) -> bytes:
        """What has arrived; empty at the end. An error after `[DONE]` is an end like any other."""
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            if self._meter is not None and self._meter.closing is not None:
                return b""
            raise self._cut(replica, error) from error

    def _phase(self, name: str) -> None:
        """From now on the request must move within the phase's time, and in all within the total time."""
        limits = self._route.timeouts
        now = time.monotonic()
        seconds = {"ttft": limits.first_token, "idle": limits.idle, "total": limits.total}[name]
        end = self._call.arrived + limits.total
        self._phase_name = name if now + seconds < end else "total"
        self._scope.reschedule(asyncio.get_running_loop().time() + min(seconds, end - now))

    def _open(self, target: Target, replica: ReplicaEntry) -> Meter:
        """The account of this call, opened at its first attempt; raises Problem 503 when it cannot be written."""
        call = self._call
        if self._meter is None:
            assert call.key is not None
            try:
                opening = self._means.journal.open(
                    project_id=call.key.project_id,
                    key_id=call.key.id,
                    model=self._route.name,
                    endpoint_id=target.endpoint_id,
                    replica_id=replica.id,
                    request_id=call.request_id.decode(),
                    path=call.path,
                    is_stream=self._asked.is_stream,
                    prompt_estimate=self._question.prompt_estimate,
                    served_model=replica.serving.model,
                )
            except OSError as error:
                raise problem.cannot_account(repr(error)) from error
            self._meter = Meter(self._means.journal, opening, call.arrived, bills_parts=not call.family.is_media)
        self._meter.endpoint_id, self._meter.replica_id = target.endpoint_id, replica.id
        self._meter.served_model, self._price = replica.serving.model, replica.serving.price
        self._meter.begin(call.attempts)
        return self._meter

    def _close(self, outcome: Outcome, status: int) -> None:
        if self._meter is None:
            return
        try:
            self._meter.close(outcome, status)
        except OSError:
            log.exception("cannot close the usage record of request %s; it will settle as estimated", self._call.request_id)

    def _settle(self) -> None:
        """Turn the reservation into what was used, and count it."""
        buckets, meter = self._call.buckets, self._meter
        used = 0
        if meter is not None and meter.closing is not None:
            closing = meter.closing
            used = closing.prompt_tokens + closing.completion_tokens
            tokens = self._means.metrics.tokens
            tokens.labels(self._route.name, "prompt").inc(closing.prompt_tokens)
            tokens.labels(self._route.name, "completion").inc(closing.completion_tokens)
            self._observe(meter)
        assert buckets is not None
        self._means.limiter.settle(buckets, used - self._reserved)
        if self._call.held is not None:
            is_billed = meter is not None and meter.closing is not None and meter.closing.is_billable
            self._call.held.settle(meter.closing if meter is not None and is_billed else None, self._price)

    def _observe(self, meter: Meter) -> None:
        if meter.first_token_at is None:
            return
        self._means.metrics.ttft.observe(meter.first_token_at - self._call.arrived)
        if meter.tokens.completion > 1:
            self._means.metrics.tpot.observe((time.monotonic() - meter.first_token_at) / (meter.tokens.completion - 1))


def _usage_form(asked: Asked) -> UsageForm:
    if asked.wants_usage:
        return UsageForm.VERBATIM if asked.wants_continuous_usage else UsageForm.AT_END
    return UsageForm.NONE


def _names_model(body: bytes) -> bool:
    """Whether a 404 is about the model: an engine that does not know the path says nothing of models."""
    return b"model" in body


def _read_usage(meter: Meter, body: bytes) -> None:
    try:
        document = json.loads(body) if body else None
    except ValueError:
        document = None
    usage = document.get("usage") if isinstance(document, dict) else None
    if isinstance(usage, dict):
        meter.tokens.read(usage)
