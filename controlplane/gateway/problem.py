"""Every error the gateway answers, in OpenAI's one shape: `{"error": {"message", "type", "param", "code"}}`.

The one rule: what must not be tried again says `x-should-retry: false`, because each SDK call costs three otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core import json

_NO_RETRY = ((b"x-should-retry", b"false"),)


@dataclass(kw_only=True, eq=False)
class Problem(Exception):
    """Raised anywhere before the first byte; `log` is for us alone and may name a replica."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())
    log: str = ""

    def document(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.document())


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> Problem:
    return Problem(status=400, type="invalid_request_error", message=message, param=param, code=code, headers=_NO_RETRY)


def invalid_key() -> Problem:
    """None, malformed, unknown, expired, revoked: the same words for all."""
    return Problem(
        status=401,
        type="invalid_request_error",
        code="invalid_api_key",
        message="The API key is missing or not valid. Send it as 'Authorization: Bearer <key>'.",
        headers=((b"www-authenticate", b"Bearer"), *_NO_RETRY),
    )


def keys_unavailable() -> Problem:
    """The database is away and this key is not among the known ones: neither good nor bad."""
    return Problem(
        status=503,
        type="server_error",
        code="key_check_unavailable",
        message="This key cannot be checked right now. Try again shortly.",
        headers=_retry_after(2),
    )


def model_not_found(model: str) -> Problem:
    return Problem(
        status=404,
        type="invalid_request_error",
        code="model_not_found",
        param="model",
        message=f"The model '{model[:200]}' does not exist or you do not have access to it.",
    )


def not_found(path: str) -> Problem:
    return Problem(status=404, type="invalid_request_error", message=f"There is nothing at {path[:200]}.", headers=_NO_RETRY)


def method_not_allowed(method: str, allowed: str) -> Problem:
    return Problem(
        status=405,
        type="invalid_request_error",
        message=f"{method} is not possible here; use {allowed}.",
        headers=((b"allow", allowed.encode()), *_NO_RETRY),
    )


def too_large(limit_bytes: int) -> Problem:
    return Problem(
        status=413,
        type="invalid_request_error",
        code="request_too_large",
        message=f"The request body is over the limit of {limit_bytes} bytes.",
        headers=(*_NO_RETRY, (b"connection", b"close")),
    )


def body_timeout() -> Problem:
    return Problem(status=408, type="timeout_error", message="The request body did not arrive in time.")


def rate_limited(what: str, wait_seconds: float) -> Problem:
    milliseconds = max(1, round(wait_seconds * 1000))
    return Problem(
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        message=f"The key's limit of {what} per minute is reached. Try again in {milliseconds / 1000:.3g} s.",
        headers=(*_retry_after(-(-milliseconds // 1000)), (b"retry-after-ms", str(milliseconds).encode())),
    )


def too_many_at_once(limit: int) -> Problem:
    return Problem(
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        message=f"The key's limit of {limit} requests at a time is reached. Try again when one has ended.",
        headers=_retry_after(1),
    )


def out_of_budget(what: str) -> Problem:
    """Spent, or what is left does not cover this request; another try will not help."""
    return Problem(
        status=429,
        type="insufficient_quota",
        code="insufficient_quota",
        message=f"The key's budget of {what} does not cover this request.",
        headers=_NO_RETRY,
    )


def not_allowed(message: str, code: str) -> Problem:
    """A key that is good, but not for this."""
    return Problem(status=403, type="invalid_request_error", code=code, message=message, headers=_NO_RETRY)


def queue_full() -> Problem:
    return Problem(
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        message="Too many requests wait for this model. Try again shortly.",
        headers=_retry_after(5),
    )


def no_ready_replicas(model: str, *, is_starting: bool) -> Problem:
    """`model_loading` while a replica is on its way, `no_ready_replicas` when none is."""
    return Problem(
        status=503,
        type="server_error",
        code="model_loading" if is_starting else "no_ready_replicas",
        message=f"The model '{model[:200]}' has no replica that is ready. Try again shortly.",
        headers=_retry_after(5),
    )


def overloaded(retry_after: bytes | None, log: str) -> Problem:
    return Problem(
        status=503,
        type="server_error",
        code="overloaded",
        message="The model's replicas are busy. Try again shortly.",
        headers=((b"retry-after", retry_after or b"2"),),
        log=log,
    )


def upstream_error(log: str) -> Problem:
    return Problem(
        status=502,
        type="server_error",
        code="upstream_error",
        message="The model's replica could not answer this request.",
        log=log,
    )


def not_supported(model: str, log: str) -> Problem:
    return Problem(
        status=400,
        type="invalid_request_error",
        code="unsupported_value",
        param="model",
        message=f"The model '{model[:200]}' does not support this kind of request.",
        headers=_NO_RETRY,
        log=log,
    )


def engine_refused(status: int, body: bytes) -> Problem:
    """The engine's refusal when it is no JSON: its words in our shape."""
    message = body[:1000].decode("utf-8", "replace").strip() or "The model refused this request."
    headers = () if status in (408, 409, 429) else _NO_RETRY
    return Problem(status=status, type="invalid_request_error", message=message, headers=headers)


def cannot_account(log: str) -> Problem:
    """The usage journal cannot be written: what cannot be accounted for is not served."""
    return Problem(
        status=503,
        type="server_error",
        code="overloaded",
        message="The gateway cannot take requests right now. Try again shortly.",
        headers=_retry_after(5),
        log=log,
    )


def timed_out(phase: str, seconds: float) -> Problem:
    """`phase`: `ttft`, `idle` or `total`. A long prefill that ran out of time would do so again: no retry."""
    words = {
        "ttft": "The model did not begin to answer",
        "idle": "The model stopped in the middle of its answer",
        "total": "The answer was not complete",
    }
    return Problem(
        status=504,
        type="timeout_error",
        code=f"{phase}_timeout",
        message=f"{words[phase]} within {seconds:g} s.",
        headers=_NO_RETRY,
    )


def stream_interrupted(log: str) -> Problem:
    return Problem(
        status=502,
        type="server_error",
        code="stream_interrupted",
        message="The model's replica stopped in the middle of its answer.",
        log=log,
    )


def internal(log: str) -> Problem:
    return Problem(status=500, type="server_error", message="The gateway failed on this request.", log=log)


def _retry_after(seconds: int) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(max(1, seconds)).encode()),)
