"""Tokens, sessions and memberships as identity reads them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import ColumnElement, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.member import Member
from controlplane.models.session import UserSession
from controlplane.models.token import Token
from controlplane.models.user import User

_FIRST_TOKEN_LOCK = 0x626564_01  # advisory lock of "make the first operator token"
_FIRST_USER_LOCK = 0x626564_02
_LAST_USED_PRECISION = timedelta(minutes=1)


def _is_live() -> ColumnElement[bool]:
    return or_(Token.expires_at.is_(None), Token.expires_at > func.now())


async def live_token(session: AsyncSession, secret_sha256: bytes, *, is_use: bool = True) -> Token | None:
    """The row of a token that may be used now; of a use, its `last_used_at` is kept to the minute."""
    now = datetime.now(UTC)
    row = await session.scalar(select(Token).where(Token.secret_sha256 == secret_sha256, _is_live()))
    if is_use and row is not None and (row.last_used_at is None or now - row.last_used_at > _LAST_USED_PRECISION):
        # SKIP LOCKED: requests that use one token at once must not wait for each other.
        free = select(Token.id).where(Token.id == row.id).with_for_update(skip_locked=True, key_share=True)
        await session.execute(
            update(Token)
            .where(Token.id.in_(free.scalar_subquery()))
            .values(last_used_at=now, updated_at=Token.updated_at)
            .execution_options(synchronize_session=False)
        )
    return row


async def live_session(
    session: AsyncSession, secret_sha256: bytes, idle: timedelta, *, is_use: bool = True
) -> tuple[UserSession, User] | None:
    """A session that may be used now and its person; of a use, its `last_used_at` is kept to the minute."""
    now = datetime.now(UTC)
    query = (
        select(UserSession, User)
        .join(User, User.id == UserSession.user_id)
        .where(
            UserSession.secret_sha256 == secret_sha256,
            UserSession.expires_at > func.now(),
            UserSession.last_used_at > func.now() - idle,
            User.is_disabled.is_(False),
        )
    )
    found = (await session.execute(query)).first()
    if found is None:
        return None
    row, user = found
    if is_use and now - row.last_used_at > _LAST_USED_PRECISION:
        free = select(UserSession.id).where(UserSession.id == row.id).with_for_update(skip_locked=True, key_share=True)
        await session.execute(
            update(UserSession)
            .where(UserSession.id.in_(free.scalar_subquery()))
            .values(last_used_at=now, updated_at=UserSession.updated_at)
            .execution_options(synchronize_session=False)
        )
    return row, user


async def enabled_user(session: AsyncSession, user_id: str) -> User | None:
    return await session.scalar(select(User).where(User.id == user_id, User.is_disabled.is_(False)))


async def memberships(session: AsyncSession, user_id: str) -> dict[str, str]:
    """Role by project id."""
    rows = await session.execute(select(Member.project_id, Member.role).where(Member.user_id == user_id))
    return {row.project_id: row.role for row in rows}


async def has_user(session: AsyncSession) -> bool:
    return await session.scalar(select(User.id).limit(1)) is not None


async def first_user(session: AsyncSession, name: str) -> User | None:
    """The person made at the first start, while nobody has set its password; locked, and only while nobody else is there."""
    await session.execute(select(func.pg_advisory_xact_lock(_FIRST_USER_LOCK)))
    users = list(await session.scalars(select(User).limit(2)))
    return users[0] if len(users) == 1 and users[0].name == name and not users[0].has_password else None


async def has_operator_token(session: AsyncSession) -> bool:
    found = await session.scalar(select(Token.id).where(Token.role == "operator", _is_live()).limit(1))
    return found is not None


async def lock_first_token(session: AsyncSession) -> None:
    await session.execute(select(func.pg_advisory_xact_lock(_FIRST_TOKEN_LOCK)))
