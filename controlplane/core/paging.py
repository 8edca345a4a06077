"""Opaque page tokens for keyset pagination: the sort key of the last row, base64url, versioned."""

from __future__ import annotations

import base64
import binascii

from controlplane.core import json
from controlplane.core.errors import InvalidInput


class PageTokenInvalid(InvalidInput):
    """The page token was not made by this list, or was cut; start again without it."""

    code = "page.token_invalid"
    status = 400
    title = "The page token is not valid"


def encode(*key: str | int) -> str:
    return base64.urlsafe_b64encode(json.dumps([1, *key])).rstrip(b"=").decode()


def decode(token: str, *, parts: int) -> tuple[str | int, ...]:
    """The key with exactly `parts` parts; raises PageTokenInvalid."""
    try:
        value = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, binascii.Error) as error:
        raise PageTokenInvalid from error
    if not isinstance(value, list) or len(value) != parts + 1 or value[0] != 1:
        raise PageTokenInvalid
    key = tuple(part for part in value[1:] if isinstance(part, str | int))
    if len(key) != parts:
        raise PageTokenInvalid
    return key
