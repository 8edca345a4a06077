"""Errors of letting a program in."""

from __future__ import annotations

from controlplane.core.errors import BedplateError, Conflict, Forbidden, NotFound, Unauthenticated


class LoginNotFound(NotFound):
    """No program waits with this code: it was mistyped, used, or its ten minutes are over. `bedplate login` shows a new one."""

    code = "login.not_found"
    title = "No program waits with this code"


class LoginAnswered(Conflict):
    """Somebody has answered this already."""

    code = "login.answered"
    title = "It was answered already"


class LoginNeedsSession(Forbidden):
    """A person lets programs in, signed in by the console: a token would give more than it has."""

    code = "login.needs_session"
    title = "Sign in to the console for this"


class LoginTooMany(BedplateError):
    """Too many programs wait to be let in; codes end after ten minutes."""

    code = "login.too_many"
    status = 429
    title = "Too many programs wait"


class LoginTooSoon(BedplateError):
    """Asked again before the interval was over; the code stays good."""

    code = "login.too_soon"
    status = 429
    title = "Asked again too soon"


class LoginEnded(Unauthenticated):
    """The secret is unknown, was used, or its ten minutes are over; begin anew."""

    code = "login.ended"
    title = "The login has ended"


class LoginDenied(Forbidden):
    """A person looked at the request and refused it."""

    code = "login.denied"
    title = "The login was denied"
