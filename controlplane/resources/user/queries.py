"""Reads of people."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor
from controlplane.core.ids import is_id
from controlplane.models.member import Member
from controlplane.models.project import Project
from controlplane.models.session import UserSession
from controlplane.models.token import Token
from controlplane.models.user import User


async def by_ref(session: AsyncSession, ref: str) -> User | None:
    """The person with this name or id."""
    column = User.id if is_id(ref) else User.name
    return None if "\0" in ref else await session.scalar(select(User).where(column == ref))


async def locked(session: AsyncSession, user_id: str) -> User | None:
    """The row as it is now, locked until the transaction ends."""
    query = select(User).where(User.id == user_id).with_for_update(key_share=True).execution_options(populate_existing=True)
    return await session.scalar(query)


async def is_signed_in(session: AsyncSession, actor: Actor) -> bool:
    """Whether the session or token of this request is still there."""
    if actor.session_id is not None:
        return await session.scalar(select(UserSession.id).where(UserSession.id == actor.session_id)) is not None
    return await session.scalar(select(Token.id).where(Token.id == actor.id)) is not None


async def memberships(session: AsyncSession, user_id: str) -> list[dict[str, str]]:
    """Project id, name and role, by project name."""
    query = (
        select(Member.project_id, Project.name.label("project"), Member.role)
        .join(Project, Project.id == Member.project_id)
        .where(Member.user_id == user_id)
        .order_by(Project.name)
    )
    return [dict(row) for row in (await session.execute(query)).mappings()]


async def member_id(session: AsyncSession, project_id: str, user_id: str) -> str | None:
    """The id of the person's membership in that project."""
    return await session.scalar(select(Member.id).where(Member.project_id == project_id, Member.user_id == user_id))
