"""Errors of the route frame, the same for every noun."""

from __future__ import annotations

from controlplane.core.errors import BedplateError, Conflict, InvalidInput, Unavailable


class MalformedJson(InvalidInput):
    """The body is not JSON; the detail says where the parser stopped."""

    code = "request.malformed_json"
    status = 400
    title = "The body is not JSON"


class MalformedRequest(BedplateError):
    """The request breaks HTTP or the API's rules before its content is looked at."""

    code = "request.malformed"
    status = 400
    title = "The request cannot be read"


class MediaTypeUnsupported(BedplateError):
    """Bodies are `Content-Type: application/json`, unless an operation says otherwise."""

    code = "request.media_type"
    status = 415
    title = "The content type is not supported"


class BodyTooLarge(BedplateError):
    """The body is larger than the listener takes (`api.max_body_bytes`). Nothing was done."""

    code = "request.too_large"
    status = 413
    title = "The body is too large"


class RouteUnknown(BedplateError):
    """No operation has this path; `/openapi.json` lists them all."""

    code = "path.not_found"
    status = 404
    title = "No such path"


class MethodNotAllowed(BedplateError):
    """The path exists, but not with this method; the `Allow` header lists what it takes."""

    code = "path.method_not_allowed"
    status = 405
    title = "Method not allowed"


class ChangedMeanwhile(BedplateError):
    """`If-Match` names another generation than the present one: read the resource again, then decide anew."""

    code = "precondition.generation"
    status = 412
    title = "The resource has changed meanwhile"


class IdempotencyMismatch(Conflict):
    """The Idempotency-Key was used for another request; a new request needs a new key."""

    code = "idempotency.mismatch"
    title = "The Idempotency-Key belongs to another request"


class IdempotencyInProgress(Conflict):
    """The first request with this Idempotency-Key is still at work; ask again in a moment with the same key."""

    code = "idempotency.in_progress"
    title = "The first request with this key is still running"


class ConstraintViolated(Conflict):
    """The change contradicts a rule of the stored data; the detail names the rule."""

    code = "conflict.constraint"
    title = "The change contradicts stored data"


class StreamUnavailable(Unavailable):
    """The host, or the watch that speaks to it, does not answer now; try again in a moment."""

    code = "stream.unavailable"
    title = "The stream cannot be opened now"


class StreamRefused(Conflict):
    """The host has no such stream: the machine does not run, has no console, or nothing listens on the port."""

    code = "stream.refused"
    title = "The stream was refused"
