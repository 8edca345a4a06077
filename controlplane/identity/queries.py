"""The token table as identity reads it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.token import Token

_FIRST_TOKEN_LOCK = 0x626564_01  # advisory lock of "make the first operator token"
_LAST_USED_PRECISION = timedelta(minutes=1)


def _is_live() -> ColumnElement[bool]:
    return or_(Token.expires_at.is_(None), Token.expires_at > func.now())


async def live_token(session: AsyncSession, secret_sha256: bytes) -> Token | None:
    """The row of a token that may be used now; its `last_used_at` is kept to the minute."""
    now = datetime.now(UTC)
    row = await session.scalar(select(Token).where(Token.secret_sha256 == secret_sha256, _is_live()))
    if row is not None and (row.last_used_at is None or now - row.last_used_at > _LAST_USED_PRECISION):
        # SKIP LOCKED: requests that use one token at once must not wait for each other.
        free = select(Token.id).where(Token.id == row.id).with_for_update(skip_locked=True, key_share=True)
        await session.execute(
            update(Token)
            .where(Token.id.in_(free.scalar_subquery()))
            .values(last_used_at=now, updated_at=Token.updated_at)
            .execution_options(synchronize_session=False)
        )
    return row


async def has_operator_token(session: AsyncSession) -> bool:
    found = await session.scalar(select(Token.id).where(Token.role == "operator", _is_live()).limit(1))
    return found is not None


async def lock_first_token(session: AsyncSession) -> None:
    await session.execute(select(func.pg_advisory_xact_lock(_FIRST_TOKEN_LOCK)))
