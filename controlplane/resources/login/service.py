"""Letting programs in (RFC 8628). The one rule: the token is made when the program takes it, once, for who said yes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Role
from controlplane.core.ids import Kind, new_id
from controlplane.identity import queries as identity
from controlplane.identity.service import NewToken, digest, new_token
from controlplane.models.login import Login
from controlplane.models.user import User
from controlplane.resources.login import queries
from controlplane.resources.login.errors import LoginAnswered, LoginDenied, LoginEnded, LoginTooMany, LoginTooSoon
from controlplane.resources.token import queries as tokens

LIFE = timedelta(minutes=10)
INTERVAL = timedelta(seconds=3)

_PREFIX = "bpd_"
_LETTERS = "BCDFGHJKLMNPQRSTVWXZ"  # no vowels: no words; RFC 8628, 6.1
_MOST_OF_ADDRESS = 20
_MOST = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A row and, this once, the program's secret."""

    row: Login
    secret: str


async def create(session: AsyncSession, *, client_name: str, client_address: str, now: datetime) -> Begun:
    """A program begins to wait; raises LoginTooMany."""
    of_address, in_all = await queries.waiting(session, client_address, now)
    if of_address >= _MOST_OF_ADDRESS or in_all >= _MOST:
        raise LoginTooMany(retry_after_seconds=int(LIFE.total_seconds()))
    secret = _PREFIX + secrets.token_urlsafe(32)
    letters = "".join(secrets.choice(_LETTERS) for _ in range(8))
    row = Login(
        id=new_id(Kind.LOGIN),
        secret_sha256=digest(secret),
        user_code=f"{letters[:4]}-{letters[4:]}",
        client_name=client_name,
        client_address=client_address,
        expires_at=now + LIFE,
    )
    session.add(row)
    await session.flush()
    return Begun(row=row, secret=secret)


def typed(code: str) -> str:
    """A code as it is stored, however it was typed."""
    letters = re.sub(r"[^A-Z]", "", code.upper())
    return f"{letters[:4]}-{letters[4:]}"


def answer(row: Login, user_id: str, state: str) -> None:
    """Say yes or no for a person; raises LoginAnswered."""
    if row.state != "pending":
        raise LoginAnswered(f"it is {row.state}")
    row.state, row.user_id = state, user_id


async def take(session: AsyncSession, secret: str, *, now: datetime, life: timedelta) -> tuple[NewToken, User] | None:
    """The token and its person, None while nobody has answered.

    Raises LoginEnded, LoginTooSoon; LoginDenied, after which the caller commits, for then it has ended.
    """
    row = await queries.by_secret(session, digest(secret), now)
    if row is None:
        raise LoginEnded
    if row.polled_at is not None and now < row.polled_at + INTERVAL:
        raise LoginTooSoon(retry_after_seconds=int(INTERVAL.total_seconds()))
    row.polled_at = now
    if row.user_id is None:
        return None
    await session.delete(row)
    user = await identity.enabled_user(session, row.user_id)
    if row.state == "denied" or user is None:
        raise LoginDenied
    made = new_token(
        name=await _free_name(session, user, row.client_name),
        role=Role.USER,
        user_id=user.id,
        maker_id=user.id,
        expires_at=now + life,
    )
    session.add(made.row)
    await session.flush()
    return made, user


async def _free_name(session: AsyncSession, user: User, client_name: str) -> str:
    """A DNS label of the program's name that none of the person's tokens has."""
    plain = re.sub(r"[^a-z0-9]+", "-", client_name.lower()).strip("-")
    name = (plain if plain[:1].isalpha() else f"login-{plain}")[:56].rstrip("-")
    taken = await tokens.names_beginning(session, user.id, name)
    return name if name not in taken else f"{name}-{secrets.token_hex(3)}"
