"""Errors are types with stable dotted codes; the route frame turns them into problem+json, the CLI into exit codes.

The one rule: a subclass states `code`, `status` and `title` once, and its docstring says when it happens and what to do;
the catalogue in docs/reference/errors.md is generated from the subclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from controlplane.core.json import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One wrong field: a JSON Pointer (RFC 6901) into the part of the request it is in, and a sentence."""

    pointer: str
    detail: str
    source: str = "body"  # or path, query, header


class BedplateError(Exception):
    """Base of every error that a user may see. Never raised itself."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Something failed inside Bedplate"
    constraint: ClassVar[str] = ""  # name of the database constraint whose violation means this error

    def __init__(self, detail: str = "", *, errors: tuple[FieldError, ...] = (), **context: Json) -> None:
        self.detail = detail or self.title
        self.errors = errors
        self.context: Mapping[str, Json] = context
        super().__init__(self.detail)


class InvalidInput(BedplateError):
    """The request does not fit its schema; `errors` names every wrong field."""

    code = "request.invalid"
    status = 422
    title = "The request is not valid"


class NotFound(BedplateError):
    """No such thing, or not yours to see."""

    code = "not_found"
    status = 404
    title = "Not found"


class Conflict(BedplateError):
    """The request contradicts the present state."""

    code = "conflict"
    status = 409
    title = "Conflict"


class Unauthenticated(BedplateError):
    """No token, or one that is unknown, expired or revoked."""

    code = "auth.token_invalid"
    status = 401
    title = "The token is missing or not valid"


class Forbidden(BedplateError):
    """The token is good, but its holder may not do this here."""

    code = "auth.forbidden"
    status = 403
    title = "Not allowed"


class NoCapacity(BedplateError):
    """No host fits; `context` says what ran short on how many hosts. Nothing was made."""

    code = "placement.no_capacity"
    status = 507
    title = "No capacity"


class Unavailable(BedplateError):
    """Something this needs is away for now; try again."""

    code = "unavailable"
    status = 503
    title = "Temporarily unavailable"


def catalogue() -> Iterator[type[BedplateError]]:
    """Every error type that has been imported, each code once, sorted by code."""
    pending: list[type[BedplateError]] = [BedplateError]
    seen: dict[str, type[BedplateError]] = {}
    while pending:
        cls = pending.pop()
        seen.setdefault(cls.code, cls)
        pending.extend(cls.__subclasses__())
    yield from (seen[code] for code in sorted(seen))
