"""Reads of programs that wait to be let in."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.login import Login

_LOCK = 0x626564_03  # advisory lock of "count those who wait, then add one"


async def by_code(session: AsyncSession, user_code: str, now: datetime, *, is_locked: bool) -> Login | None:
    """The program that waits with this code."""
    query = select(Login).where(Login.user_code == user_code, Login.expires_at > now)
    return await session.scalar(query.with_for_update() if is_locked else query)


async def by_secret(session: AsyncSession, secret_sha256: bytes, now: datetime) -> Login | None:
    """The same by the program's secret, locked until the transaction ends."""
    query = select(Login).where(Login.secret_sha256 == secret_sha256, Login.expires_at > now)
    return await session.scalar(query.with_for_update())


async def waiting(session: AsyncSession, address: str, now: datetime) -> tuple[int, int]:
    """How many wait from that address, and in all; nobody else begins to until the transaction ends."""
    await session.execute(select(func.pg_advisory_xact_lock(_LOCK)))
    of_address = func.count().filter(Login.client_address == address)
    row = (await session.execute(select(of_address, func.count()).where(Login.expires_at > now))).one()
    return row[0], row[1]
