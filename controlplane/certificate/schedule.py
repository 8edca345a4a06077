"""When a certificate is asked for. Pure: settings, what is held, what was tried → a time and the reason.

The one rule: it holds across restarts, so a process that starts again and again does not ask an authority again and again.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from controlplane.certificate.store import Held, Record
from controlplane.settings import AcmeSettings

_LEFT = 1 / 3  # of its life, when it is renewed
_SPREAD = 1 / 30  # of its life, by which renewals of many are spread, towards the earlier
_FIRST_PAUSE = timedelta(minutes=5)  # public authorities allow about five failed validations an hour
_LONGEST_PAUSE = timedelta(hours=6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    at: datetime
    why: str


def mark_of(acme: AcmeSettings) -> str:
    """Changes when another certificate is wanted: other names, another authority, another account's address."""
    wanted = [acme.directory_url, sorted(acme.domains), acme.email, acme.terms_agreed]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:16]


def renew_at(held: Held) -> datetime:
    """A third of its life before the end, and up to a thirtieth sooner; the same each time for one certificate."""
    life = held.not_after - held.not_before
    return held.not_after - life * (_LEFT + _SPREAD * random.Random(held.serial).random())  # noqa: S311 - no secret


def due(acme: AcmeSettings, held: Held | None, record: Record, now: datetime) -> Due:
    """When to ask next, and why; a time that is not after `now` means at once."""
    wanted = _wanted(acme, held, record, now)
    if (
        record.next_try_at
        and record.tried_for == mark_of(acme)
        and (later := datetime.fromisoformat(record.next_try_at)) > wanted.at
    ):
        return replace(wanted, at=later)
    return wanted


def _wanted(acme: AcmeSettings, held: Held | None, record: Record, now: datetime) -> Due:
    if held is None or held.is_self_signed:
        return Due(at=now, why="there is no certificate yet")
    if missing := sorted(set(acme.domains) - held.names):
        return Due(at=now, why=f"the certificate does not name {', '.join(missing)}")
    if record.issued_for and record.issued_for != mark_of(acme):
        return Due(at=now, why="the settings changed since it was issued")
    return Due(at=renew_at(held), why=f"it ends at {held.not_after:%Y-%m-%d %H:%M} UTC")


def begun(acme: AcmeSettings, record: Record, now: datetime) -> Record:
    """The record while a try is under way: if it is cut off, the next one waits all the same."""
    mark = mark_of(acme)
    failures = record.failures if record.tried_for == mark else 0
    return replace(record, tried_for=mark, failures=failures, next_try_at=_stamp(now + _pause(failures + 1)))


def failed(acme: AcmeSettings, record: Record, now: datetime, words: str, *, retry_after: timedelta | None) -> Record:
    """The record after a failure: 5 minutes, doubled up to 6 hours, give or take a quarter; never sooner than told."""
    mark = mark_of(acme)
    failures = record.failures + 1 if record.tried_for == mark else 1
    return replace(
        record,
        tried_for=mark,
        failures=failures,
        last_error=words,
        last_error_at=_stamp(now),
        next_try_at=_stamp(now + max(_pause(failures), retry_after or timedelta())),
    )


def _pause(failures: int) -> timedelta:
    doubled = _FIRST_PAUSE * 2 ** min(failures - 1, 10)
    return min(doubled, _LONGEST_PAUSE) * random.uniform(0.75, 1.25)  # noqa: S311 - no secret


def _stamp(moment: datetime) -> str:
    return moment.isoformat(timespec="seconds")


def succeeded(acme: AcmeSettings) -> Record:
    return Record(issued_for=mark_of(acme), tried_for=mark_of(acme))
