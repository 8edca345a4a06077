"""Errors of keys."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class KeyNotFound(NotFound):
    """No such key in this project; `bedplate key list` shows them."""

    code = "key.not_found"
    title = "No such key"


class KeyNameTaken(Conflict):
    """Another key of the project has this name. Revoke that one first, or take another name."""

    code = "key.name_taken"
    title = "The name is taken"
    constraint = "key_project_id_name_idx"


class KeyExpiryInvalid(InvalidInput):
    """`expires_at` lies in the past."""

    code = "key.expiry_invalid"
    title = "The key would have expired already"
