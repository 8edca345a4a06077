"""`/v1/sessions`: browsers signed in. The session's secret is in an HttpOnly cookie and in no body."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import ColumnElement
from starlette.responses import RedirectResponse, Response

from controlplane.api import session as cookies
from controlplane.api.frame import Call, Noun, Page, PageOf, Ref, RequestContext
from controlplane.audit import service as audit
from controlplane.authz.service import Actor
from controlplane.core.errors import FieldError
from controlplane.core.json import JsonObject
from controlplane.identity import guessing
from controlplane.identity import password as passwords
from controlplane.identity.errors import AddressLocked, SsoAbsent, SsoRefused, SsoUnavailable
from controlplane.identity.oidc import Provider, new_flow
from controlplane.identity.service import digest, new_session
from controlplane.models.session import UserSession
from controlplane.models.user import User
from controlplane.resources.session import queries, service, sso
from controlplane.resources.session.errors import CodeNeeded, LinkInvalid, SessionNotFound, SignInRefused
from controlplane.resources.session.schemas import Methods, Redeem, SessionView, SignedIn, SignIn, SsoMethod
from controlplane.resources.user import queries as users
from controlplane.resources.user import service as user_service
from controlplane.resources.user.errors import UserLocked, UserPasswordWeak
from controlplane.resources.user.schemas import UserView

_REFUSALS = [SignInRefused, CodeNeeded, UserLocked, AddressLocked]

noun = Noun("session", "sessions", in_project=False, has_operations=False)
router = noun.router


@noun.route("POST", "", "create", SignedIn, status=201, is_public=True, errors=_REFUSALS)
async def create(call: Call, body: SignIn, response: Response) -> SignedIn:
    """Sign in with name, password and, where the account asks for it, a one-time code. Sets the session's cookie."""
    now = call.services.clock.now()
    await cookies.refuse_address(call)
    found = await users.by_ref(call.session, body.name)
    counted = found or await guessing.of_name(call.session, body.name)
    if counted is not None:
        user_service.refuse_locked(counted, now)
    stored = found.password_hash if found is not None and not found.is_disabled else None
    async with call.outside():
        is_right = await passwords.is_right(body.password, stored)
    user = None if found is None else await users.locked(call.session, found.id)
    if user is None:
        await _refuse_nobody(call, body.name)
        raise SignInRefused
    await _check(call, user, body, is_right=is_right and user.password_hash == stored and not user.is_disabled)
    return await _signed_in(call, user, response)


@noun.route(
    "POST", "/redeem", "redeem", SignedIn, status=201, is_public=True, errors=[LinkInvalid, UserPasswordWeak, AddressLocked]
)
async def redeem(call: Call, body: Redeem, response: Response) -> SignedIn:
    """Open an account by its one-time link: sets the password, ends one-time codes and other sessions, and signs in."""
    link, now = digest(body.link), call.services.clock.now()
    await cookies.refuse_address(call)
    user = await queries.by_link(call.session, link, now)
    if user is None:
        await cookies.count_failure(call)
        await call.release()
        raise LinkInvalid
    user_service.check_password(user.name, body.password, pointer="/password")
    async with call.outside():
        new_hash = await passwords.hashed(body.password)
    user = await queries.by_link(call.session, link, now)
    if user is None:
        raise LinkInvalid
    before = audit.snapshot(user)
    user.password_hash, user.link_sha256, user.link_expires_at = new_hash, None, None
    user_service.remove_totp(user)
    guessing.forgive(user)
    await user_service.end_sessions(call.session, user)
    signed_in = await _signed_in(call, user, response)
    await audit.record(
        call.session,
        call.actor,
        "user.redeem",
        subject_kind="user",
        subject_id=user.id,
        request_id=call.request_id,
        before=before,
        after=audit.snapshot(user),
    )
    return signed_in


@noun.route("GET", "/methods", "methods", Methods, is_public=True)
async def methods(call: Call) -> Methods:
    """By what one may sign in besides name and password."""
    if call.services.oidc is None:
        return Methods(sso=None)
    return Methods(sso=SsoMethod(name=call.services.settings.oidc.name, path="/v1/sessions/sso/start"))


Next = Annotated[
    str, Query(alias="next", max_length=1000, description="Path of the console to come back to.", examples=["/p/default"])
]
State = Annotated[str, Query(max_length=500, description="What the sign-in began with.", examples=["…"])]
Code = Annotated[str, Query(max_length=4000, description="What the provider gives for an ID token.", examples=["…"])]
Said = Annotated[str, Query(max_length=200, description="Why the provider refuses.", examples=["access_denied"])]
_TO_PROVIDER: dict[int | str, dict[str, Any]] = {303: {"description": "To the identity provider."}}
_TO_CONSOLE: dict[int | str, dict[str, Any]] = {303: {"description": "To the console, signed in or with `?refused=<code>`."}}


@noun.route(
    "GET",
    "/sso/start",
    "start-sso",
    None,
    status=303,
    is_public=True,
    errors=[SsoAbsent, SsoUnavailable, AddressLocked],
    answers=_TO_PROVIDER,
    response_class=RedirectResponse,
)
async def start_sso(call: Call, next_path: Next = "/") -> Response:
    """Sign in by the identity provider: the browser is sent there and comes back."""
    await cookies.refuse_address(call)
    provider = _provider(call)
    flow = new_flow(sso.own_path(next_path))
    async with call.outside():
        url = await provider.authorization_url(flow, cookies.finish_url(call))
    answer = RedirectResponse(url, 303)
    cookies.keep_flow(answer, call.request, sso.sealed(call.services.sealer, flow), seconds=sso.FLOW_SECONDS)
    return answer


@noun.route(
    "GET",
    "/sso/finish",
    "finish-sso",
    None,
    status=303,
    is_public=True,
    answers=_TO_CONSOLE,
    response_class=RedirectResponse,
)
async def finish_sso(call: Call, state: State = "", code: Code = "", error: Said = "") -> Response:
    """Where the identity provider sends the browser back to."""
    try:
        answer = await _finished(call, state, code, error)
    except (SsoRefused, SsoUnavailable, SsoAbsent, AddressLocked) as refusal:
        await call.session.rollback()
        if isinstance(refusal, SsoRefused):
            await cookies.count_failure(call)
        answer = RedirectResponse(f"/?refused={refusal.code}", 303)
    cookies.forget_flow(answer, call.request)
    return answer


@noun.list(SessionView)
async def list_(call: Call, page: Page) -> PageOf[UserSession]:
    """List your sessions; an operator sees everybody's."""
    return await call.page(UserSession, page, fields=["user_id", "expires_at", "last_used_at"], seen=_seen(call))


@noun.route("DELETE", "/current", "delete-current", None, status=204)
async def delete_current(call: Call) -> Response:
    """Sign out: the session of this request ends here, whatever the browser keeps."""
    if call.actor.session_id is not None:
        await call.session.delete(await call.load(UserSession, call.actor.session_id))
    gone = Response(status_code=204)
    cookies.forget(gone, call.request)
    return gone


@noun.show(SessionView, errors=[SessionNotFound])
async def show(call: Call, session: Ref) -> UserSession:
    """Show one session."""
    return await call.load(UserSession, session, seen=_seen(call))


@noun.delete(SessionView)
async def delete(call: Call, session: Ref) -> None:
    """End a session: the next request with its cookie is refused."""
    await call.session.delete(await call.load(UserSession, session, seen=_seen(call)))


def _seen(call: Call) -> list[ColumnElement[bool]]:
    return [] if call.actor.is_operator else [UserSession.user_id == call.actor.user_id]


def _provider(call: RequestContext) -> Provider:
    if call.services.oidc is None:
        raise SsoAbsent
    return call.services.oidc


async def _finished(call: RequestContext, state: str, code: str, error: str) -> Response:
    """Signed in by what the provider says; raises SsoRefused, SsoUnavailable, SsoAbsent, AddressLocked."""
    await cookies.refuse_address(call)
    provider, settings = _provider(call), call.services.settings.oidc
    flow = sso.opened(call.services.sealer, cookies.flow_of(call.request), state)
    if error or not code:
        raise SsoRefused(f"the identity provider says {error or 'nothing'}")
    async with call.outside():
        claims = await provider.claims(flow, code, cookies.finish_url(call))
    user, is_new = await sso.person(call.session, settings, claims)
    given = await sso.give_roles(call.session, settings, user, claims.groups)
    answer = RedirectResponse(flow.next, 303)
    signed_in = await _signed_in(call, user, answer)
    after: JsonObject = {"issuer": claims.issuer, "is_new": is_new, "roles": {**given}, "session": signed_in.id}
    await audit.record(
        call.session,
        call.actor,
        "session.finish-sso",
        subject_kind="user",
        subject_id=user.id,
        request_id=call.request_id,
        after=after,
    )
    return answer


async def _refuse_nobody(call: RequestContext, name: str) -> None:
    """Count for a name that nobody has what would be counted for one that somebody has; raises UserLocked."""
    now = call.services.clock.now()
    row = await guessing.locked_name(call.session, name, now)
    user_service.refuse_locked(row, now)
    guessing.count(row, now)
    await cookies.count_failure(call)
    await call.release()


async def _check(call: Call, user: User, body: SignIn, *, is_right: bool) -> None:
    """Count and refuse what is wrong, forget earlier failures after what is right."""
    now = call.services.clock.now()
    user_service.refuse_locked(user, now)
    if is_right and user.has_totp and body.code is None:
        raise CodeNeeded(errors=(FieldError(pointer="/code", detail="is needed"),))
    if is_right and user.has_totp and body.code is not None:
        is_right = user_service.use_code(user, body.code, call.services.sealer, now)
    if is_right:
        guessing.forgive(user)
        return
    about = {"client_address": call.client_address}
    await user_service.refused(call.session, call.actor, user, now=now, request_id=call.request_id, **about)
    await cookies.count_failure(call)
    await call.release()
    raise SignInRefused


async def _signed_in(call: Call, user: User, response: Response) -> SignedIn:
    now, api = call.services.clock.now(), call.services.settings.api
    await service.purge_ended(call.session, user, now)
    made = new_session(
        user,
        user_agent=call.request.headers.get("user-agent", ""),
        client_address=call.client_address,
        now=now,
        life=timedelta(hours=api.session_hours),
    )
    call.session.add(made.row)
    await call.session.flush()
    call.subject, call.before = made.row, None
    call.actor = Actor(id=user.id, name=user.name, is_operator=user.is_operator, user_id=user.id, session_id=made.row.id)
    cookies.keep(response, call.request, made.secret, until=made.row.expires_at)
    view = SessionView.model_validate(made.row).model_dump()
    return SignedIn(**view, user=UserView.model_validate(user))
