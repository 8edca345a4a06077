"""The audit trail. The one rule: an entry is written in the transaction of the change, with every secret masked."""

from __future__ import annotations

import re
from datetime import date, datetime
from enum import Enum

from sqlalchemy import LargeBinary, inspect
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json, JsonObject
from controlplane.models.audit import AuditEntry
from controlplane.models.base import Base

MASK = "•••"
_SECRET_NAME = re.compile(r"secret|password|passphrase|token$|private|credential|sealed|api_key", re.IGNORECASE)


def snapshot(row: Base) -> JsonObject:
    """The loaded columns of a row as JSON; masked: bytes, and columns named like secrets or with `info={"secret": True}`."""
    state = inspect(row)
    values: JsonObject = {}
    for attribute in state.mapper.column_attrs:
        column = attribute.columns[0]
        value = state.dict.get(attribute.key)
        if value is None:
            values[attribute.key] = None
        elif column.info.get("secret") or isinstance(column.type, LargeBinary) or _SECRET_NAME.search(attribute.key):
            values[attribute.key] = MASK
        else:
            values[attribute.key] = masked(value)
    return values


def masked(value: object) -> Json:
    """`value` as JSON, with what hides under secret-looking keys masked at every depth."""
    match value:
        case None | bool() | int() | float() | str():
            return value.value if isinstance(value, Enum) else value
        case dict():
            return {str(key): MASK if _SECRET_NAME.search(str(key)) and item else masked(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [masked(item) for item in value]
        case datetime() | date():
            return value.isoformat()
        case bytes():
            return MASK
        case _:
            return str(value)


async def record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    *,
    subject_kind: str,
    subject_id: str,
    project_id: str | None = None,
    request_id: str = "",
    before: JsonObject | None = None,
    after: JsonObject | None = None,
) -> None:
    """Add one entry to the session; it lives or dies with the caller's transaction.

    Many parameters, because each is a column and none can be left to a reader's guess.
    """
    entry = AuditEntry(
        id=new_id(Kind.AUDIT),
        actor=actor.id,
        actor_name=actor.name,
        action=action,
        project_id=project_id,
        subject_kind=subject_kind,
        subject_id=subject_id,
        request_id=request_id,
        before=before,
        after=after,
    )
    session.add(entry)
    await session.flush()
