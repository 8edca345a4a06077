"""Who is asking: tokens, sessions and one-time links made, hashed and looked up. The one rule: what is secret of them
leaves this module once, when it is made.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor, Role
from controlplane.core.errors import Unauthenticated
from controlplane.core.files import write_whole
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import SealBroken, Sealer
from controlplane.identity import queries
from controlplane.identity.errors import SessionEnded, TokenMissing
from controlplane.models.deployment import Deployment
from controlplane.models.session import UserSession
from controlplane.models.token import Token
from controlplane.models.user import User

LINK_LIFE = timedelta(days=1)
OPERATOR_LINK_FILE = "operator-link"

_PREFIX = "bpt_"
_LINK_PREFIX = "bpl_"
_SESSION_PREFIX = "bps_"
_FIRST_USER_NAME = "admin"
_USER_AGENT_CHARACTERS = 256
_KEY_CHECK = b"bedplate"
_KEY_CHECK_CONTEXT = "deployment.key_check"
_SECRET_BYTES = 32
_OPERATOR_TOKEN_NAME = "first-operator"  # noqa: S105 - the row's name
_OPERATOR_TOKEN_FILE = "operator-token"  # noqa: S105 - a file name


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """A token row and, this once, its plain text."""

    row: Token
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSession:
    """A session row and, this once, the secret of its cookie."""

    row: UserSession
    secret: str


def digest(secret: str) -> bytes:
    """What is stored of a token: 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def new_token(
    *,
    name: str,
    role: Role,
    project_id: str | None = None,
    user_id: str | None = None,
    maker_id: str | None = None,
    scopes: Sequence[str] = (),
    expires_at: datetime | None = None,
) -> NewToken:
    """A fresh token, not yet in any session. Many parameters, because each is a column."""
    secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row = Token(
        id=new_id(Kind.TOKEN),
        name=name,
        role=role.value,
        project_id=project_id,
        user_id=user_id,
        maker_id=maker_id,
        scopes=list(scopes),
        secret_sha256=digest(secret),
        hint=secret[-4:],
        expires_at=expires_at,
    )
    return NewToken(row=row, secret=secret)


def new_session(user: User, *, user_agent: str, client_address: str, now: datetime, life: timedelta) -> NewSession:
    """A fresh session, not yet in any transaction; its secret goes into the browser's cookie."""
    secret = _SESSION_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row = UserSession(
        id=new_id(Kind.SESSION),
        user_id=user.id,
        secret_sha256=digest(secret),
        user_agent=user_agent[:_USER_AGENT_CHARACTERS],
        client_address=client_address,
        expires_at=now + life,
        last_used_at=now,
    )
    return NewSession(row=row, secret=secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a request shows of who asks: the Authorization header, and a browser's session cookie."""

    authorization: str | None = None
    session_secret: str | None = None


async def authenticate(
    session: AsyncSession, shown: Credentials, *, idle: timedelta = timedelta(hours=12), is_use: bool = True
) -> Actor:
    """The actor behind a header or, without one, a cookie; raises TokenMissing, Unauthenticated or SessionEnded.

    A look at what is still open is no use (`is_use` False): it keeps no session from being idle.
    """
    if shown.authorization:
        return await _holder(session, shown.authorization, is_use=is_use)
    if shown.session_secret:
        found = await queries.live_session(session, digest(shown.session_secret), idle, is_use=is_use)
        if found is None:
            raise SessionEnded
        row, user = found
        return await _person(session, user, session_id=row.id)
    raise TokenMissing


async def _holder(session: AsyncSession, authorization: str, *, is_use: bool) -> Actor:
    """The actor of a bearer token."""
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise TokenMissing("the Authorization header must be: Bearer <token>")
    row = await queries.live_token(session, digest(secret.strip()), is_use=is_use)
    if row is None:
        raise Unauthenticated("the token is unknown, expired or revoked")
    scopes = tuple(str(scope) for scope in row.scopes)
    if row.user_id is not None:
        user = await queries.enabled_user(session, row.user_id)
        if user is None:
            raise Unauthenticated("the token's person is disabled")
        person = await _person(session, user)
        return replace(person, id=row.id, name=row.name, scopes=scopes, expires_at=row.expires_at)
    if row.role == Role.OPERATOR and row.maker_id is not None:
        maker = await queries.enabled_user(session, row.maker_id)
        if maker is None or not maker.is_operator:
            raise Unauthenticated("whoever made this operator token is no operator any more")
    roles = {} if row.project_id is None else {row.project_id: Role(row.role)}
    is_operator = row.role == Role.OPERATOR
    return Actor(id=row.id, name=row.name, is_operator=is_operator, roles=roles, scopes=scopes, expires_at=row.expires_at)


async def _person(session: AsyncSession, user: User, *, session_id: str | None = None) -> Actor:
    roles = {project: Role(role) for project, role in (await queries.memberships(session, user.id)).items()}
    return Actor(id=user.id, name=user.name, is_operator=user.is_operator, roles=roles, user_id=user.id, session_id=session_id)


def new_link(user: User, now: datetime) -> str:
    """A one-time link's secret, by which its person sets a password within a day; an earlier one is void."""
    secret = _LINK_PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    user.link_sha256, user.link_expires_at = digest(secret), now + LINK_LIFE
    return secret


async def ensure_first_user(session: AsyncSession, state_dir: Path) -> None:
    """While nobody can sign in, keep a one-time link of the first operator 0600 in `<state_dir>/operator-link`.

    The caller commits. A link is made anew at each start until somebody used it; then the file goes.
    """
    path = state_dir / OPERATOR_LINK_FILE
    user = await queries.first_user(session, _FIRST_USER_NAME)
    if user is None:
        if await queries.has_user(session):
            path.unlink(missing_ok=True)
            return
        user = User(id=new_id(Kind.USER), name=_FIRST_USER_NAME, display_name="First operator", is_operator=True)
        session.add(user)
    secret = new_link(user, datetime.now(UTC))
    await session.flush()
    write_whole(path, f"{secret}\n".encode())


async def ensure_operator_token(session: AsyncSession, state_dir: Path) -> str | None:
    """Make the first operator token when no live one exists, and write it 0600 to `<state_dir>/operator-token`.

    Returns its plain text to be printed once, or None when there is one already. The caller commits: the file is
    written before, so a crash in between leaves a file whose token is unknown, and the next start makes a new one.
    """
    path = state_dir / _OPERATOR_TOKEN_FILE
    await queries.lock_first_token(session)
    if await queries.has_operator_token(session):
        return None
    made = new_token(name=f"{_OPERATOR_TOKEN_NAME}-{datetime.now(UTC):%Y%m%d%H%M%S}", role=Role.OPERATOR)
    session.add(made.row)
    await session.flush()
    write_whole(path, f"{made.secret}\n".encode())
    return made.secret


class MasterKeyWrong(RuntimeError):
    """The master key is another one than this database's secrets are sealed with."""


async def check_master_key(session: AsyncSession, sealer: Sealer) -> None:
    """Remember the master key's mark at the first start, compare it later; raises MasterKeyWrong. The caller commits."""
    made = insert(Deployment).values(id=1, key_check=sealer.seal(_KEY_CHECK, context=_KEY_CHECK_CONTEXT))
    await session.execute(made.on_conflict_do_nothing())
    sealed = await session.scalar(select(Deployment.key_check))
    try:
        sealer.open(sealed or b"", context=_KEY_CHECK_CONTEXT)
    except SealBroken as error:
        raise MasterKeyWrong(
            "the master key is not the one that this database's secrets are sealed with: put the former key back, "
            "or run `bedplate master-key rotate` again where a rotation was cut"
        ) from error
