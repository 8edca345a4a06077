"""Reads of sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.user import User


async def by_link(session: AsyncSession, link_sha256: bytes, now: datetime) -> User | None:
    """The person whose live one-time link this is, locked until the transaction ends."""
    query = select(User).where(User.link_sha256 == link_sha256, User.link_expires_at > now, User.is_disabled.is_(False))
    return await session.scalar(query.with_for_update(key_share=True).execution_options(populate_existing=True))
