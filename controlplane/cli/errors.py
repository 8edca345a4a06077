"""What a command can end with. The one rule: an error says what happened, why, and the next command to try."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """The exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4
    CONFLICT = 5
    NO_CAPACITY = 6
    TIMED_OUT = 7
    INTERRUPTED = 130


_BY_STATUS = {
    400: Exit.USAGE,
    401: Exit.NOT_ALLOWED,
    403: Exit.NOT_ALLOWED,
    404: Exit.NOT_FOUND,
    409: Exit.CONFLICT,
    412: Exit.CONFLICT,
    413: Exit.USAGE,
    415: Exit.USAGE,
    422: Exit.USAGE,
    429: Exit.NO_CAPACITY,
    504: Exit.TIMED_OUT,
    507: Exit.NO_CAPACITY,
}

_NEXT_BY_CODE = {
    "auth.token_missing": "bedplate login URL",
    "auth.token_invalid": "bedplate login URL",
    "address.attached": "bedplate address attach … --move",
    "address.in_use": "bedplate address detach NAME, then release it",
    "address.family_taken": "bedplate address list",
    "loadbalancer.address_in_use": "bedplate address attach NAME --lb LB --move, once the load balancer is there",
    "loadbalancer.backend_not_found": "bedplate lb show LB",
    "placement.no_capacity": "bedplate placement explain",
    "project.not_found": "bedplate project list",
}


_LISTED = {
    *("address", "endpoint", "firewall", "host", "image", "key", "model", "network", "pool", "project", "route", "token"),
    *("user", "vm", "volume"),
}
_LISTED_BY = {"backend": "vm", "loadbalancer": "lb", "target": "vm", "peer": "firewall"}


def _next(code: str, status: int, noun: str) -> str:
    """The command that shows what a name clashed with, or which names there are."""
    what, _, reason = code.partition(".")
    if hint := _NEXT_BY_CODE.get(code):
        return hint
    if reason.endswith("_unknown"):
        thing = reason.removesuffix("_unknown")
        thing = _LISTED_BY.get(thing, thing)
        return f"bedplate {thing} list" if thing in _LISTED | {"lb"} else ""
    if reason.endswith("_taken") and noun:
        return f"bedplate {noun} list"
    if status == 404 and noun:
        return f"bedplate {_LISTED_BY.get(what, noun)} list"
    if status >= 500 and status not in {503, 507}:
        return "look for the request id in the log of the API"
    return ""


class CommandFailed(Exception):
    """Ends the command with words on stderr and `exit_code`."""

    def __init__(
        self, what: str, *, why: str = "", hint: str = "", exit_code: Exit = Exit.FAILED, request_id: str = "", code: str = ""
    ) -> None:
        super().__init__(what)
        self.what, self.why, self.hint = what, why, hint
        self.exit_code, self.request_id, self.code = exit_code, request_id, code

    def tell(self) -> None:
        """Print it for a person."""
        print(f"Error: {self.what}", file=sys.stderr)
        for name, text in (("why", self.why), ("try", self.hint), ("code", self.code), ("request", self.request_id)):
            if text:
                print(f"  {name + ':':<9}{text}", file=sys.stderr)


def exit_code_of(code: str, status: int = 0) -> Exit:
    """The exit code for an error code or an HTTP status."""
    if code.endswith(("no_capacity", "quota.exceeded", "insufficient_quota")):
        return Exit.NO_CAPACITY
    return _BY_STATUS.get(status, Exit.FAILED)


def from_problem(status: int, problem: Mapping[str, Any], noun: str = "") -> CommandFailed:
    """The error for a problem+json answer; `noun` names the list command for what was not found."""
    code = str(problem.get("code", ""))
    fields: Sequence[Mapping[str, Any]] = problem.get("errors") or []
    detail = str(problem.get("detail", ""))
    title = str(problem.get("title", "")) or f"HTTP {status}"
    why = "; ".join(f"{field.get('pointer') or 'the body'}: {field.get('detail')}" for field in fields) or detail
    return CommandFailed(
        title,
        why=why if why != title else "",
        hint=_next(code, status, noun),
        exit_code=exit_code_of(code, status),
        request_id=str(problem.get("request_id", "")),
        code=code,
    )
