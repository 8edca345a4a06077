"""Changes of keys. The one rule: the plain text is in the answer of the request that made it, and nowhere else."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.core.money import micros_of
from controlplane.models.key import Key
from controlplane.resources.key.errors import KeyExpiryInvalid
from controlplane.resources.key.publish import publish

PREFIX = "bpk_"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key's row and, this once, its plain text."""

    row: Key
    secret: str


async def create(
    session: AsyncSession,
    project_id: str,
    *,
    name: str,
    now: datetime,
    **columns: Any,
) -> NewKey:
    """A key that the gateway takes within a second; `columns` as in the row. Raises KeyExpiryInvalid."""
    _check_expiry(columns.get("expires_at"), now)
    columns = _stored(columns)
    secret = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row = Key(
        id=new_id(Kind.KEY),
        project_id=project_id,
        name=name,
        secret_sha256=hashlib.sha256(secret.encode()).digest(),
        hint=secret[-4:],
        **columns,
    )
    session.add(row)
    await publish(session, "keys")
    return NewKey(row=row, secret=secret)


async def change(session: AsyncSession, key: Key, changes: dict[str, Json | datetime], now: datetime) -> None:
    expires_at = changes.get("expires_at")
    _check_expiry(expires_at if isinstance(expires_at, datetime) else None, now)
    for name, value in _stored(changes).items():
        setattr(key, name, value)
    key.generation += 1
    await publish(session, "keys")


async def revoke(session: AsyncSession, key: Key) -> None:
    """The gateway refuses it within a second; usage keeps naming it by its id."""
    await session.delete(key)
    await publish(session, "keys")


def _stored(fields: dict[str, Any]) -> dict[str, Any]:
    """Amounts of money as the row has them."""
    money = {name: fields[name] for name in ("money_budget", "money_budget_soft") if name in fields}
    rest = {name: value for name, value in fields.items() if name not in money}
    return rest | {f"{name}_micros": None if value is None else micros_of(value) for name, value in money.items()}


def _check_expiry(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is not None and expires_at <= now:
        raise KeyExpiryInvalid(errors=(FieldError(pointer="/expires_at", detail="lies in the past"),))
