"""Errors of tokens."""

from __future__ import annotations

from controlplane.core.errors import Conflict, Forbidden, InvalidInput, NotFound


class TokenNotFound(NotFound):
    """No such token; `bedplate token list` shows them."""

    code = "token.not_found"
    title = "No such token"


class TokenNameTaken(Conflict):
    """Another token of this owner has this name: of the person, of the project, or of the deployment."""

    code = "token.name_taken"
    title = "The name is taken"
    constraint = "token_owner_name_key"


class TokenRoleInvalid(InvalidInput):
    """A project role belongs to a project, `operator` and `user` to none; `user` is for people, who make it for themselves."""

    code = "token.role_invalid"
    title = "The role does not fit the project"


class TokenExpiryInvalid(InvalidInput):
    """`expires_at` lies in the past, or beyond the end of the token that asks."""

    code = "token.expiry_invalid"
    title = "The token's end is not valid"


class TokenScopeInvalid(InvalidInput):
    """A scope is a pattern of actions (`vm.*`, `*.list`). Who has scopes gives no others."""

    code = "token.scope_invalid"
    title = "The scopes are not valid"


class TokenRoleForbidden(Forbidden):
    """One gives no more than one has: operators make operator tokens, project admins those of their project."""

    code = "token.role_forbidden"
    title = "Not yours to give"


class TokenNameAmbiguous(Conflict):
    """Tokens of several owners have this name: take the id; the context lists them."""

    code = "token.name_ambiguous"
    title = "Several tokens have this name"
