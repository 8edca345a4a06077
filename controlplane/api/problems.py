"""Every error becomes one problem+json (RFC 9457). The one rule: nothing of an unexpected error's text reaches the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.responses import Response

from controlplane.api.errors import (
    ConstraintViolated,
    MalformedJson,
    MalformedRequest,
    MediaTypeUnsupported,
    MethodNotAllowed,
    RouteUnknown,
)
from controlplane.api.schemas import PATTERN_WORDS, WRONG_FIELD
from controlplane.core import json
from controlplane.core.errors import BedplateError, FieldError, InvalidInput, Unauthenticated, Unavailable, catalogue

MEDIA_TYPE = "application/problem+json"
_RETRY_SECONDS = "1"
_log = logging.getLogger(__name__)
_LOST_CLASSES = ("08", "57", "53", "40", "55P03", "25006")
# connection; shutdown, and a statement that took too long (57014); resources; deadlock; lock; read-only


def render(error: BedplateError, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """The answer for an error."""
    body = {
        "type": f"/docs/errors#{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail,
        "code": error.code,
        "request_id": request_id,
        "errors": [{"pointer": item.pointer, "detail": item.detail, "source": item.source} for item in error.errors],
        "context": dict(error.context),
    }
    answer = Response(json.dumps(body), error.status, dict(headers or {}), MEDIA_TYPE)
    answer.headers["x-request-id"] = request_id
    if isinstance(error, Unauthenticated):
        answer.headers["www-authenticate"] = 'Bearer realm="bedplate"'
    if isinstance(error, Unavailable):
        answer.headers["retry-after"] = _RETRY_SECONDS
    if "retry_after_seconds" in error.context:
        answer.headers["retry-after"] = str(error.context["retry_after_seconds"])
    return answer


def translate(error: Exception) -> BedplateError:
    """The error a client may see for any exception; what is not foreseen becomes `internal` and is logged."""
    match error:
        case BedplateError():
            return error
        case RequestValidationError():
            return _from_validation(error)
        case HTTPException():
            return _from_http(error)
        case IntegrityError():
            return _from_constraint(error)
        case DBAPIError() if error.connection_invalidated or _sqlstate(error).startswith(_LOST_CLASSES):
            _log.warning("the database did not answer: %s", error.orig)
            return Unavailable("the database is busy or away; try again")
        case DBAPIError() if _sqlstate(error).startswith("22"):
            return InvalidInput("a value cannot be stored: it is too large or holds characters that are not text")
        case PoolTimeout() | ConnectionError() | TimeoutError():
            _log.warning("the database did not answer: %s", error)
            return Unavailable("the database is busy or away; try again")
        case SQLAlchemyError() | OSError() | _:
            _log.error("unexpected error", exc_info=error)
            return BedplateError("an unexpected error was logged under this request id")


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem."""

    async def handle(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        return render(translate(error), request.scope.get("bedplate.request_id", ""), headers)

    for kind in (BedplateError, RequestValidationError, HTTPException, SQLAlchemyError, ConnectionError, TimeoutError):
        app.add_exception_handler(kind, handle)


def pointer(location: tuple[int | str, ...]) -> str:
    """RFC 6901: `~` and `/` inside a part are escaped."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


def _from_validation(error: RequestValidationError) -> BedplateError:
    found: list[FieldError] = []
    for item in error.errors():
        source, *rest = item["loc"]
        if item["type"] == "json_invalid":
            reason = item.get("ctx", {}).get("error", "")
            return MalformedJson(f"the body is not JSON: {reason} at character {rest[0] if rest else 0}")
        if source == "body" and not rest and item["type"] in {"model_attributes_type", "dict_type", "model_type"}:
            found.append(FieldError(pointer="", detail="the body must be a JSON object (Content-Type: application/json)"))
            continue
        if item["type"] == WRONG_FIELD:
            rest.append(item["ctx"]["field"])
        found.append(FieldError(pointer=pointer(tuple(rest)), detail=_words(item), source=str(source)))
    wrong = ", ".join(f"{item.source} {item.pointer}".strip() for item in found)
    return InvalidInput(f"not valid: {wrong}", errors=tuple(found))


def _words(item: Mapping[str, Any]) -> str:
    """Ours as they were said; a pattern by what it means."""
    context = item.get("ctx", {})
    match item["type"]:
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            return PATTERN_WORDS.get(str(context["pattern"]), "is not of the form that the reference gives for it")
        case _:
            return str(item["msg"])


def _from_http(error: HTTPException) -> BedplateError:
    if isinstance(error.__cause__, BedplateError):
        return error.__cause__  # FastAPI wraps whatever reading the body raises
    match error.status_code:
        case 404:
            return RouteUnknown()
        case 405:
            return MethodNotAllowed()
        case 415:
            return MediaTypeUnsupported()
        case _:
            return MalformedRequest(str(error.detail))


def _sqlstate(error: DBAPIError) -> str:
    cause = error.orig.__cause__ if error.orig is not None else None
    return str(getattr(error.orig, "sqlstate", None) or getattr(cause, "sqlstate", None) or "")


def _from_constraint(error: IntegrityError) -> BedplateError:
    """The error type that claims the violated constraint by `constraint = "…"`, else the general one."""
    name = str(getattr(error.orig.__cause__, "constraint_name", "") or "") if error.orig is not None else ""
    for kind in catalogue():
        if name and kind.constraint == name:
            return kind()
    _log.warning("no error type claims the constraint %s", name or error.orig)
    return ConstraintViolated(f"the rule {name} does not allow this" if name else "")
