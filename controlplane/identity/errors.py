"""Errors of identity."""

from __future__ import annotations

from controlplane.core.errors import BedplateError, Forbidden, NotFound, Unauthenticated, Unavailable


class TokenMissing(Unauthenticated):
    """The request has neither an `Authorization: Bearer …` header nor a session; send the token of `bedplate login`."""

    code = "auth.token_missing"
    title = "A bearer token is needed"


class SessionEnded(Unauthenticated):
    """The session has ended (signed out, idle for too long, or ended elsewhere). Sign in again; nothing was changed."""

    code = "auth.session_ended"
    title = "Sign in again"


class CrossSite(Forbidden):
    """A change came with a browser's session, but not from the console's own pages. Programs use a token instead."""

    code = "auth.cross_site"
    title = "The request comes from another site"


class AddressLocked(BedplateError):
    """Too many failures from the client's address, whatever the names: nothing is looked at before the time that is named."""

    code = "auth.address_locked"
    status = 429
    title = "Too many failures from your address"


class SsoRefused(Unauthenticated):
    """What the identity provider says lets nobody in here; the detail says why, the log of the API more."""

    code = "auth.sso_refused"
    title = "The sign-in by the provider was refused"


class SsoAbsent(NotFound):
    """No identity provider is set up (`oidc.issuer`): sign in by name and password."""

    code = "auth.sso_absent"
    title = "No identity provider is set up"


class SsoUnavailable(Unavailable):
    """The identity provider does not answer; name and password go on working."""

    code = "auth.sso_unavailable"
    title = "The identity provider does not answer"
