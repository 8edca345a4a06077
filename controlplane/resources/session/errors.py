"""Errors of signing in."""

from __future__ import annotations

from controlplane.core.errors import NotFound, Unauthenticated


class SessionNotFound(NotFound):
    """No such session, or somebody else's."""

    code = "session.not_found"
    title = "No such session"


class SignInRefused(Unauthenticated):
    """Name, password or one-time code is wrong, or the account is disabled. Which of them is not said."""

    code = "session.refused"
    title = "Sign-in refused"


class CodeNeeded(Unauthenticated):
    """The password is right; this account also asks for the code of its authenticator. Send it as `code`."""

    code = "session.code_needed"
    title = "A one-time code is needed"


class LinkInvalid(Unauthenticated):
    """The one-time link was used, replaced or is older than a day; an operator makes a new one with `bedplate user invite`."""

    code = "session.link_invalid"
    title = "The link is not valid"
