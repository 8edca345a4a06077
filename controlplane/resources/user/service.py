"""Changes of people. The one rule: whatever weakens or replaces a proof of who one is ends that person's other sessions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.audit import service as audit
from controlplane.authz.service import Actor
from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, new_id
from controlplane.core.json import JsonObject
from controlplane.core.sealing import Sealer
from controlplane.identity import guessing
from controlplane.identity import password as passwords
from controlplane.identity.guessing import Counted
from controlplane.models.session import UserSession
from controlplane.models.token import Token
from controlplane.models.user import User
from controlplane.resources.user.errors import UserCodeWrong, UserLocked, UserPasswordWeak, UserTotpState


async def create(session: AsyncSession, *, name: str, display_name: str, is_operator: bool) -> User:
    user = User(id=new_id(Kind.USER), name=name, display_name=display_name, is_operator=is_operator)
    session.add(user)
    await session.flush()
    return user


def check_password(user_name: str, new: str, *, pointer: str = "/new") -> None:
    """Raises UserPasswordWeak."""
    if not passwords.MIN_CHARACTERS <= len(new) <= passwords.MAX_CHARACTERS:
        words = f"has {len(new)} characters; between {passwords.MIN_CHARACTERS} and {passwords.MAX_CHARACTERS} are needed"
    elif new.casefold() == user_name.casefold():
        words = "is the name itself"
    else:
        return
    raise UserPasswordWeak(f"the password {words}", errors=(FieldError(pointer=pointer, detail=words),))


async def end_sessions(session: AsyncSession, user: User, *, but: str | None = None) -> None:
    """End every session of a person, except one."""
    query = delete(UserSession).where(UserSession.user_id == user.id)
    await session.execute(query if but is None else query.where(UserSession.id != but))


async def end_operator_tokens(session: AsyncSession, user: User) -> None:
    """Remove the operator tokens that this person made; without them they would be refused."""
    await session.execute(delete(Token).where(Token.maker_id == user.id, Token.role == "operator"))


def refuse_locked(row: Counted, now: datetime) -> None:
    """Raises UserLocked while the account, or a name that nobody has, looks at no password."""
    seconds = guessing.locked_seconds(row, now)
    if seconds:
        raise UserLocked(f"too many failures for this account; try again in {seconds} s", retry_after_seconds=seconds)


async def refused(session: AsyncSession, actor: Actor, user: User, *, now: datetime, request_id: str, **about: str) -> None:
    """Count and audit a wrong proof. The caller commits before it refuses."""
    guessing.count(user, now)
    after: JsonObject = {**about, "failed_sign_ins": user.failed_sign_ins}
    await audit.record(
        session, actor, "user.refused", subject_kind="user", subject_id=user.id, request_id=request_id, after=after
    )


def start_totp(user: User, sealer: Sealer) -> str:
    """A new secret for one-time codes, not asked for before it is confirmed; raises UserTotpState."""
    if user.has_totp:
        raise UserTotpState("one-time codes are on; remove them first")
    secret = passwords.new_totp_secret()
    user.totp_sealed, user.totp_last_step = sealer.seal(secret.encode(), context=_context(user)), 0
    return secret


def use_code(user: User, code: str, sealer: Sealer, now: datetime) -> bool:
    """Whether `code` is right and unused; then it is used. A person without a secret has no code."""
    if user.totp_sealed is None:
        return False
    secret = sealer.open(user.totp_sealed, context=_context(user)).decode()
    step = passwords.totp_step(secret, code, now=now, after_step=user.totp_last_step)
    if step is None:
        return False
    user.totp_last_step = step
    return True


def confirm_totp(user: User, code: str, sealer: Sealer, now: datetime) -> None:
    """From now on sign-in asks for a code; raises UserTotpState, UserCodeWrong."""
    if user.has_totp or user.totp_sealed is None:
        raise UserTotpState("one-time codes are on already" if user.has_totp else "start the set-up first")
    if not use_code(user, code, sealer, now):
        raise UserCodeWrong(errors=(FieldError(pointer="/code", detail="is not of this time"),))
    user.has_totp = True


def remove_totp(user: User) -> None:
    user.has_totp, user.totp_sealed, user.totp_last_step = False, None, 0


def _context(user: User) -> str:
    return f"user.totp:{user.id}"
