"""Signing in. The one rule: failures are counted in the row and stand before the refusal is answered; after five in a row
each next one is looked at later.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.session import UserSession
from controlplane.models.user import User
from controlplane.resources.session.errors import SignInLocked

_FREE_FAILURES = 5
_FIRST_LOCK = timedelta(seconds=15)
_LONGEST_LOCK = timedelta(minutes=15)


def refuse_locked(user: User, now: datetime) -> None:
    """Raises SignInLocked while the account looks at no password."""
    if user.locked_until is not None and user.locked_until > now:
        seconds = int((user.locked_until - now).total_seconds()) + 1
        raise SignInLocked(f"too many failures for this account; try again in {seconds} s", retry_after_seconds=seconds)


def count_failure(user: User, now: datetime) -> None:
    """From the fifth in a row on, the account is locked for 15 s, then 30 s, …, at most 15 minutes."""
    user.failed_sign_ins += 1
    beyond = user.failed_sign_ins - _FREE_FAILURES
    if beyond >= 0:
        user.locked_until = now + min(_FIRST_LOCK * 2 ** min(beyond, 16), _LONGEST_LOCK)


def forgive(user: User) -> None:
    user.failed_sign_ins, user.locked_until = 0, None


async def purge_ended(session: AsyncSession, user: User, now: datetime) -> None:
    """Remove the person's sessions that are over."""
    await session.execute(delete(UserSession).where(UserSession.user_id == user.id, UserSession.expires_at <= now))
