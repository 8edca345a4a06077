"""Reads of sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import is_id
from controlplane.models.member import Member
from controlplane.models.project import Project
from controlplane.models.user import User


async def by_link(session: AsyncSession, link_sha256: bytes, now: datetime) -> User | None:
    """The person whose live one-time link this is, locked until the transaction ends."""
    query = select(User).where(User.link_sha256 == link_sha256, User.link_expires_at > now, User.is_disabled.is_(False))
    return await session.scalar(query.with_for_update(key_share=True).execution_options(populate_existing=True))


_SSO_LOCK = 0x626564_04  # advisory lock of "look for the person, then make them"


async def lock_sso(session: AsyncSession) -> None:
    """One sign-in by the provider at a time looks for its person."""
    await session.execute(select(func.pg_advisory_xact_lock(_SSO_LOCK)))


async def by_subject(session: AsyncSession, issuer: str, subject: str) -> User | None:
    """Who the provider says it is, locked until the transaction ends."""
    query = select(User).where(User.sso_issuer == issuer, User.sso_subject == subject)
    return await session.scalar(query.with_for_update(key_share=True).execution_options(populate_existing=True))


async def by_name(session: AsyncSession, name: str) -> User | None:
    """The same by name."""
    query = select(User).where(User.name == name)
    return await session.scalar(query.with_for_update(key_share=True).execution_options(populate_existing=True))


async def project(session: AsyncSession, ref: str) -> Project | None:
    column = Project.id if is_id(ref) else Project.name
    return await session.scalar(select(Project).where(column == ref).with_for_update(read=True, key_share=True))


async def member(session: AsyncSession, project_id: str, user_id: str) -> Member | None:
    return await session.scalar(
        select(Member).where(Member.project_id == project_id, Member.user_id == user_id).with_for_update(of=Member)
    )
