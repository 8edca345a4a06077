"""Errors of tokens."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class TokenNotFound(NotFound):
    """No such token; `bedplate token list` shows them."""

    code = "token.not_found"
    title = "No such token"


class TokenNameTaken(Conflict):
    """Another token has this name; names of tokens are unique in a deployment."""

    code = "token.name_taken"
    title = "The name is taken"
    constraint = "token_name_key"


class TokenRoleInvalid(InvalidInput):
    """A `member` token belongs to a project, an `operator` token to none."""

    code = "token.role_invalid"
    title = "The role does not fit the project"


class TokenExpiryInvalid(InvalidInput):
    """`expires_at` lies in the past."""

    code = "token.expiry_invalid"
    title = "The token would have expired already"
