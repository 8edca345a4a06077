"""The usage record: one for each request that reached a replica, identified by who wrote it, never by the client's id.

The one rule: (day, gateway, segment, sequence) is decided when the record is opened and never changes, so writing a record
twice is writing it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from controlplane.core.json import JsonObject


class Outcome(StrEnum):
    COMPLETED = "completed"
    CLIENT_CLOSED = "client_closed"
    UPSTREAM_DIED = "upstream_died"
    REFUSED = "refused"
    TIMED_OUT = "timed_out"
    GATEWAY_DIED = "gateway_died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is known when a request is sent to a replica. `started_at` in microseconds since the epoch.

    `served_model`: the catalogue's name of what answers, which the price book knows; `model` is the public one.
    """

    segment: int
    sequence: int
    started_at: int
    project_id: str
    key_id: str
    model: str
    endpoint_id: str
    replica_id: str
    request_id: str
    path: str
    is_stream: bool
    prompt_estimate: int
    served_model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How it ended, and at which replica. `is_estimated`: the tokens are counted by us, not told by the engine."""

    ended_at: int
    outcome: Outcome
    status: int
    endpoint_id: str
    replica_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    is_estimated: bool
    is_billable: bool
    attempts: int = 1
    first_token_ms: int | None = None
    served_model: str = ""


def row(gateway: str, opening: Opening, closing: Closing) -> JsonObject:
    """The database row; the day is the UTC day on which the request was opened."""
    started_at = datetime.fromtimestamp(opening.started_at / 1e6, UTC)
    values: JsonObject = {name: getattr(opening, name) for name in Opening.__slots__}
    values |= {name: getattr(closing, name) for name in Closing.__slots__}
    del values["prompt_estimate"]
    values |= {
        "gateway": gateway,
        "day": started_at.date().isoformat(),
        "started_at": started_at.isoformat(),
        "ended_at": datetime.fromtimestamp(closing.ended_at / 1e6, UTC).isoformat(),
        "outcome": closing.outcome.value,
        "served_model": closing.served_model or opening.served_model,
    }
    return values


def settled_after_crash(opening: Opening, *, prompt: int, completion: int, at: int) -> Closing:
    """What an open record becomes when its gateway died: its last progress, flagged."""
    return Closing(
        ended_at=at,
        outcome=Outcome.GATEWAY_DIED,
        status=499,
        endpoint_id=opening.endpoint_id,
        replica_id=opening.replica_id,
        prompt_tokens=prompt or (opening.prompt_estimate if completion else 0),
        completion_tokens=completion,
        is_estimated=True,
        is_billable=completion > 0,
        served_model=opening.served_model,
    )
