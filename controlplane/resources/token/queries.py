"""Reads of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import is_id
from controlplane.models.project import Project
from controlplane.models.token import Token


async def project(session: AsyncSession, ref: str) -> Project | None:
    """The project with this name or id, kept from being deleted until the transaction ends."""
    column = Project.id if is_id(ref) else Project.name
    return await session.scalar(select(Project).where(column == ref).with_for_update(read=True, key_share=True))


async def ids_by_name(session: AsyncSession, name: str, seen: Sequence[ColumnElement[bool]]) -> list[str]:
    """Of the tokens that are seen; several owners may have one of a name."""
    return list(await session.scalars(select(Token.id).where(Token.name == name, *seen).order_by(Token.id)))


async def maker_id(session: AsyncSession, token_id: str) -> str | None:
    """The person who made a token."""
    return await session.scalar(select(Token.maker_id).where(Token.id == token_id))


async def names_beginning(session: AsyncSession, user_id: str, name: str) -> set[str]:
    """Of the person's own tokens."""
    query = select(Token.name).where(Token.user_id == user_id, Token.name.startswith(name, autoescape=True))
    return set(await session.scalars(query))
