"""Errors of people."""

from __future__ import annotations

from controlplane.core.errors import BedplateError, Conflict, Forbidden, InvalidInput, NotFound


class UserNotFound(NotFound):
    """No such person; `bedplate user list` shows them. A token that belongs to no person has no `current` one either."""

    code = "user.not_found"
    title = "No such person"


class UserNameTaken(Conflict):
    """Another person has this name; names of people are unique in a deployment."""

    code = "user.name_taken"
    title = "The name is taken"
    constraint = "user_name_key"


class UserPasswordWrong(InvalidInput):
    """The present password is another one; nothing was changed."""

    code = "user.password_wrong"
    title = "The present password is wrong"


class UserLocked(BedplateError):
    """Too many wrong passwords or codes for this name, whether or not somebody has it; the detail says until when none is
    looked at.
    """

    code = "user.locked"
    status = 429
    title = "Too many failures"


class UserPasswordWeak(InvalidInput):
    """A password has 12 to 256 characters and is not the name. No other rule: length is what helps."""

    code = "user.password_weak"
    title = "The new password is too weak"


class UserCodeWrong(InvalidInput):
    """The one-time code is not of this time or was used already; check the authenticator's clock."""

    code = "user.code_wrong"
    title = "The one-time code is wrong"


class UserTotpState(Conflict):
    """One-time codes are on already, or their set-up was never started; the detail says which."""

    code = "user.totp_state"
    title = "One-time codes are not in that state"


class UserTokenNarrowed(Forbidden):
    """A one-time link or the operator's flag is worth more than a token that is narrowed by scopes or ends; use another one."""

    code = "user.token_narrowed"
    title = "This token gives less than that"


class UserIsSelf(Conflict):
    """One cannot disable, demote or delete oneself: another operator does it."""

    code = "user.is_self"
    title = "Not to oneself"
