"""`/v1/users`: people. An operator makes them; each proves who they are by a one-time link, then a password."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.core.errors import FieldError
from controlplane.identity import guessing
from controlplane.identity import password as passwords
from controlplane.identity.errors import SessionEnded
from controlplane.identity.service import new_link
from controlplane.models.user import User
from controlplane.resources.user import queries, service
from controlplane.resources.user.errors import (
    UserCodeWrong,
    UserIsSelf,
    UserLocked,
    UserNameTaken,
    UserNotFound,
    UserPasswordWeak,
    UserPasswordWrong,
    UserTokenNarrowed,
    UserTotpState,
)
from controlplane.resources.user.schemas import (
    CurrentUser,
    Membership,
    PasswordChange,
    Proof,
    TotpConfirm,
    TotpStarted,
    UserCreate,
    UserLink,
    UserUpdate,
    UserView,
)

_UNPROVEN = [UserNotFound, UserPasswordWrong, UserLocked]

noun = Noun("user", "users", in_project=False, has_operations=False)
router = noun.router


@noun.create(UserLink, errors=[UserNameTaken, UserTokenNarrowed])
async def create(call: Call, body: UserCreate) -> UserLink:
    """Make a person's account. The answer holds the one-time link by which they set their password."""
    if body.is_operator:
        _refuse_narrowed(call)
    call.subject = user = await service.create(call.session, **body.model_dump())
    return _linked(call, user)


@noun.list(UserView)
async def list_(call: Call, page: Page) -> PageOf[User]:
    """List the people of the deployment."""
    return await call.page(User, page, fields=["is_operator", "is_disabled", "display_name"])


@noun.route("GET", "/current", "current", CurrentUser, errors=[UserNotFound])
async def current(call: Call) -> CurrentUser:
    """Show the person of this request: who am I, and what am I where."""
    user = await _me(call)
    memberships = [Membership(**row) for row in await queries.memberships(call.session, user.id)]
    return CurrentUser(**UserView.model_validate(user).model_dump(), memberships=memberships)


@noun.route("POST", "/current/password", "password", UserView, errors=[*_UNPROVEN, UserPasswordWeak])
async def change_password(call: Call, body: PasswordChange) -> User:
    """Change one's own password; all other sessions of this person end."""
    user = await _me(call)
    service.check_password(user.name, body.new)
    user, new_hash = await _proven(call, user, body.current, new=body.new, pointer="/current")
    user.password_hash, user.link_sha256, user.link_expires_at = new_hash, None, None
    await service.end_sessions(call.session, user, but=call.actor.session_id)
    return user


@noun.route("POST", "/current/start-totp", "start-totp", TotpStarted, errors=[*_UNPROVEN, UserTotpState])
async def start_totp(call: Call, body: Proof) -> TotpStarted:
    """Begin to use one-time codes: the answer holds the secret for the authenticator. Sign-in asks once it is confirmed."""
    user, _ = await _proven(call, await _me(call), body.password, pointer="/password")
    secret = service.start_totp(user, call.services.sealer)
    return TotpStarted(secret=secret, uri=passwords.totp_uri(secret, user.name))


@noun.route("POST", "/current/confirm-totp", "confirm-totp", UserView, errors=[UserNotFound, UserTotpState, UserCodeWrong])
async def confirm_totp(call: Call, body: TotpConfirm) -> User:
    """Show a first code: from now on sign-in asks for one."""
    user = await _me(call)
    service.confirm_totp(user, body.code, call.services.sealer, call.services.clock.now())
    await service.end_sessions(call.session, user, but=call.actor.session_id)
    return user


@noun.route("POST", "/current/remove-totp", "remove-totp", UserView, errors=_UNPROVEN)
async def remove_totp(call: Call, body: Proof) -> User:
    """Stop using one-time codes; asks for the password."""
    user, _ = await _proven(call, await _me(call), body.password, pointer="/password")
    service.remove_totp(user)
    await service.end_sessions(call.session, user, but=call.actor.session_id)
    return user


@noun.show(UserView, errors=[UserNotFound])
async def show(call: Call, user: Ref) -> User:
    """Show one person."""
    return await call.load(User, user)


@noun.update(UserView, errors=[UserNotFound, UserIsSelf, UserTokenNarrowed])
async def update(call: Call, user: Ref, body: UserUpdate) -> User:
    """Change the fields that are sent. Disabling ends the person's sessions, and their tokens are refused."""
    row = await call.load(User, user)
    changes = body.model_dump(exclude_unset=True, exclude_none=True)
    if row.id == call.actor.user_id and (changes.get("is_disabled") or changes.get("is_operator") is False):
        raise UserIsSelf("another operator disables or demotes you")
    if changes.get("is_operator"):
        _refuse_narrowed(call)
    for name, value in changes.items():
        setattr(row, name, value)
    if row.is_disabled:
        await service.end_sessions(call.session, row)
    return row


@noun.delete(UserView, errors=[UserIsSelf])
async def delete(call: Call, user: Ref) -> None:
    """Delete a person's account with its memberships, sessions, personal tokens and the operator tokens they made.

    Tokens of projects stay: programs work by them. They go on naming who made them.
    """
    row = await call.load(User, user)
    if row.id == call.actor.user_id:
        raise UserIsSelf("another operator deletes your account")
    await service.end_operator_tokens(call.session, row)
    await call.session.delete(row)


@noun.action("invite", UserLink, errors=[UserNotFound, UserTokenNarrowed])
async def invite(call: Call, user: Ref) -> UserLink:
    """Make a new one-time link, for a lost password or authenticator: using it sets a password and ends one-time codes."""
    _refuse_narrowed(call)
    return _linked(call, await call.load(User, user))


def _linked(call: Call, user: User) -> UserLink:
    secret = new_link(user, call.services.clock.now())
    assert user.link_expires_at is not None
    shown = UserView.model_validate(user).model_dump()
    return UserLink(**shown, link=f"/welcome#{secret}", link_expires_at=user.link_expires_at)


async def _me(call: Call) -> User:
    """The person of this request, locked when it changes something; raises UserNotFound for tokens without one."""
    if call.actor.user_id is None:
        raise UserNotFound("this token belongs to no person")
    return await call.load(User, call.actor.user_id)


async def _proven(call: Call, user: User, password: str, *, pointer: str, new: str = "") -> tuple[User, str]:
    """The person as they are now, locked, when this is their password; and the hash of a new one.

    Nothing is held while it is compared, for that takes long; what changed meanwhile refuses. A wrong one is counted.
    """
    now, stored = call.services.clock.now(), user.password_hash
    service.refuse_locked(user, now)
    async with call.outside():
        is_right = await passwords.is_right(password, stored)
        new_hash = await passwords.hashed(new) if is_right and new else ""
    present = await queries.locked(call.session, user.id)
    if present is None or present.is_disabled or not await queries.is_signed_in(call.session, call.actor):
        raise SessionEnded
    service.refuse_locked(present, now)
    if is_right and present.password_hash == stored:
        guessing.forgive(present)
        return present, new_hash
    await service.refused(call.session, call.actor, present, now=now, request_id=call.request_id)
    await call.release()
    raise UserPasswordWrong(errors=(FieldError(pointer=pointer, detail="is not the present password"),))


def _refuse_narrowed(call: Call) -> None:
    if call.actor.scopes or call.actor.expires_at is not None:
        raise UserTokenNarrowed
