"""`/v1/logins`: programs that ask to be let in by a person who is signed in to the console (`bedplate login`)."""

from __future__ import annotations

from datetime import timedelta

from controlplane.api.frame import Call, Noun, Ref, RequestContext
from controlplane.api.session import count_failure, refuse_address
from controlplane.audit import service as audit
from controlplane.authz.service import Actor
from controlplane.identity.errors import AddressLocked
from controlplane.models.login import Login
from controlplane.resources.login import queries, service
from controlplane.resources.login.errors import (
    LoginAnswered,
    LoginDenied,
    LoginEnded,
    LoginNeedsSession,
    LoginNotFound,
    LoginTooMany,
    LoginTooSoon,
)
from controlplane.resources.login.schemas import LoginBegun, LoginCreate, LoginPoll, LoginPolled, LoginView
from controlplane.resources.token.schemas import TokenCreated, TokenView

_ANSWERED = [LoginNotFound, LoginAnswered, LoginNeedsSession, AddressLocked]

noun = Noun("login", "logins", in_project=False, has_operations=False)
router = noun.router


@noun.route("POST", "", "create", LoginBegun, status=201, is_public=True, errors=[LoginTooMany, AddressLocked])
async def create(call: Call, body: LoginCreate) -> LoginBegun:
    """A program asks to be let in: it shows the code to its person and keeps the secret."""
    await refuse_address(call)
    begun = await service.create(
        call.session, client_name=body.client_name, client_address=call.client_address, now=call.services.clock.now()
    )
    shown = LoginView.model_validate(begun.row).model_dump()
    seconds = int(service.INTERVAL.total_seconds())
    return LoginBegun(**shown, secret=begun.secret, page=f"/device?code={begun.row.user_code}", interval_seconds=seconds)


@noun.route(
    "POST",
    "/poll",
    "poll",
    LoginPolled,
    is_public=True,
    errors=[LoginEnded, LoginDenied, LoginTooSoon, AddressLocked],
)
async def poll(call: Call, body: LoginPoll) -> LoginPolled:
    """The program asks whether it was let in. The token is in the first answer after that, and in no other."""
    await refuse_address(call)
    now, life = call.services.clock.now(), timedelta(days=call.services.settings.api.login_token_days)
    try:
        taken = await service.take(call.session, body.secret, now=now, life=life)
    except LoginEnded:
        await count_failure(call)
        await call.release()
        raise
    except LoginDenied:
        await call.release()
        raise
    if taken is None:
        return LoginPolled(state="pending")
    made, user = taken
    call.actor = Actor(id=user.id, name=user.name, is_operator=user.is_operator, user_id=user.id)
    call.subject = made.row
    token = TokenCreated(**TokenView.model_validate(made.row).model_dump(), secret=made.secret)
    return LoginPolled(state="approved", token=token)


@noun.show(LoginView, errors=[LoginNotFound, AddressLocked])
async def show(call: Call, login: Ref) -> Login:
    """What asks to be let in with this code."""
    return await _load(call, login)


@noun.action("approve", LoginView, errors=_ANSWERED)
async def approve(call: Call, login: Ref) -> Login:
    """Let the program in as yourself: it gets a personal token, which `bedplate token list` shows and `token revoke` ends."""
    return await _answered(call, login, "approved")


@noun.action("deny", LoginView, errors=_ANSWERED)
async def deny(call: Call, login: Ref) -> Login:
    """Refuse the program."""
    return await _answered(call, login, "denied")


async def _answered(call: RequestContext, code: str, state: str) -> Login:
    if call.actor.session_id is None or call.actor.user_id is None:
        raise LoginNeedsSession
    row = await _load(call, code)
    service.answer(row, call.actor.user_id, state)
    return row


async def _load(call: RequestContext, code: str) -> Login:
    """By the code; a wrong one counts as a failure of the client's address."""
    await refuse_address(call)
    row = await queries.by_code(call.session, service.typed(code), call.services.clock.now(), is_locked=call.is_write)
    if row is None:
        await count_failure(call)
        await call.release()
        raise LoginNotFound
    call.subject = row
    call.before = audit.snapshot(row) if call.is_write else None
    return row
