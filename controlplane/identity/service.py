"""Who is asking: bearer tokens made, hashed and looked up. The one rule: a token's plain text leaves this module once."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
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
from controlplane.identity.errors import TokenMissing
from controlplane.models.deployment import Deployment
from controlplane.models.token import Token

_PREFIX = "bpt_"
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


def digest(secret: str) -> bytes:
    """What is stored of a token: 256 random bits need no slow hash."""
    return hashlib.sha256(secret.encode()).digest()


def new_token(*, name: str, role: Role, project_id: str | None = None, expires_at: datetime | None = None) -> NewToken:
    """A fresh token, not yet in any session."""
    secret = _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
    row = Token(
        id=new_id(Kind.TOKEN),
        name=name,
        role=role.value,
        project_id=project_id,
        secret_sha256=digest(secret),
        hint=secret[-4:],
        expires_at=expires_at,
    )
    return NewToken(row=row, secret=secret)


async def authenticate(session: AsyncSession, authorization: str | None) -> Actor:
    """The actor behind an Authorization header; raises TokenMissing or Unauthenticated."""
    if not authorization:
        raise TokenMissing
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise TokenMissing("the Authorization header must be: Bearer <token>")
    row = await queries.live_token(session, digest(secret.strip()))
    if row is None:
        raise Unauthenticated("the token is unknown, expired or revoked")
    return Actor(id=row.id, name=row.name, role=Role(row.role), project_id=row.project_id)


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
            "the master key is not the one that this database's secrets are sealed with: put the former key back"
        ) from error
