"""A browser's session on the way in and out. The one rule: its cookie is never readable by a page's script, never sent along
by another site, and never enough for a change that another site's page asks for.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from urllib.parse import urlsplit

from sqlalchemy.ext.asyncio import AsyncSession
from starlette.requests import HTTPConnection
from starlette.responses import Response

from controlplane.api.call import RequestContext, Services
from controlplane.authz.service import Actor
from controlplane.identity import guessing
from controlplane.identity.errors import CrossSite
from controlplane.identity.service import Credentials, authenticate

COOKIE = "bedplate_session"
_FLOW_COOKIE = "bedplate_sso"
_FLOW_PATH = "/v1/sessions/sso"
_SAFE_METHODS = frozenset({"GET", "HEAD"})


async def authenticated(
    services: Services,
    session: AsyncSession,
    connection: HTTPConnection,
    *,
    authorization: str | None = None,
    is_use: bool = True,
) -> Actor:
    """The actor behind the header, else behind the cookie; raises what `authenticate` does, and CrossSite."""
    shown = Credentials(
        authorization=authorization or connection.headers.get("authorization"), session_secret=connection.cookies.get(COOKIE)
    )
    if not shown.authorization and shown.session_secret:
        _refuse_cross_site(connection)
    idle = timedelta(minutes=services.settings.api.session_idle_minutes)
    return await authenticate(session, shown, idle=idle, is_use=is_use)


def _refuse_cross_site(connection: HTTPConnection) -> None:
    """Changes and WebSockets need a browser's word that they come from our own pages (`Sec-Fetch-Site`, else `Origin`)."""
    if connection.scope["type"] == "http" and connection.scope["method"] in _SAFE_METHODS:
        return
    site = connection.headers.get("sec-fetch-site")
    origin = connection.headers.get("origin")
    is_ours = site == "same-origin" if site else bool(origin) and urlsplit(origin).netloc == connection.headers.get("host")
    if not is_ours:
        raise CrossSite("a change with a session must come from the console's own pages; programs send a bearer token")


def keep(response: Response, connection: HTTPConnection, secret: str, *, until: datetime) -> None:
    """Give the browser its session."""
    response.set_cookie(
        COOKIE,
        secret,
        expires=until,
        path="/",
        secure=connection.url.scheme in {"https", "wss"},
        httponly=True,
        samesite="strict",
    )


def forget(response: Response, connection: HTTPConnection) -> None:
    """Take the session from the browser; what ends it is the row's end."""
    is_secure = connection.url.scheme in {"https", "wss"}
    response.delete_cookie(COOKIE, path="/", secure=is_secure, httponly=True, samesite="strict")


async def refuse_address(call: RequestContext) -> None:
    """Raises AddressLocked while the client's address has failed too often."""
    await guessing.refuse_address(call.session, call.client_address, call.services.clock.now())


async def count_failure(call: RequestContext) -> None:
    """A failure of the client's address; the caller commits."""
    now, most = call.services.clock.now(), call.services.settings.api.sign_in_failures_per_address
    await guessing.count_address(call.session, call.client_address, now, most=most)


def finish_url(call: RequestContext) -> str:
    """Where an identity provider sends the browser back to."""
    base = call.services.settings.oidc.public_url or str(call.request.base_url)
    return f"{base.rstrip('/')}{_FLOW_PATH}/finish"


def flow_of(connection: HTTPConnection) -> str | None:
    return connection.cookies.get(_FLOW_COOKIE)


def keep_flow(response: Response, connection: HTTPConnection, sealed: str, *, seconds: int) -> None:
    """Give the browser the sign-in that it begins. Lax, because it comes back from another site."""
    is_secure = connection.url.scheme == "https"
    response.set_cookie(_FLOW_COOKIE, sealed, max_age=seconds, path=_FLOW_PATH, secure=is_secure, httponly=True, samesite="lax")


def forget_flow(response: Response, connection: HTTPConnection) -> None:
    is_secure = connection.url.scheme == "https"
    response.delete_cookie(_FLOW_COOKIE, path=_FLOW_PATH, secure=is_secure, httponly=True, samesite="lax")
