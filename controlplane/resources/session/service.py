"""Changes of sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.session import UserSession
from controlplane.models.user import User


async def purge_ended(session: AsyncSession, user: User, now: datetime) -> None:
    """Remove the person's sessions that are over."""
    await session.execute(delete(UserSession).where(UserSession.user_id == user.id, UserSession.expires_at <= now))
