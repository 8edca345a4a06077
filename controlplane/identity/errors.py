"""Errors of identity."""

from __future__ import annotations

from controlplane.core.errors import Unauthenticated


class TokenMissing(Unauthenticated):
    """The request has no `Authorization: Bearer …` header; send the token of `bedplate login` or `operator-token`."""

    code = "auth.token_missing"
    title = "A bearer token is needed"
