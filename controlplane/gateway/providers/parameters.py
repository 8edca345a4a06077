"""`ext_params` of a request: what a client says to the provider alone, laid beside the rest of the body.

The one rule: nothing is overwritten. What stands in both places is a 400 that names both.
"""

from __future__ import annotations

from controlplane.core import json
from controlplane.core.json import JsonObject
from controlplane.gateway import problem
from controlplane.gateway.body import remove_member, replace_member

NAME = "ext_params"


def parameters(document: JsonObject) -> JsonObject:
    """Raises Problem 400 when it is no object, or collides with the body."""
    given = document.get(NAME)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise problem.bad_request(f"{NAME} must be an object.", param=NAME)
    for name in given:
        if name in document:
            message = f"'{name}' and '{NAME}.{name}' are both given; give one of them."
            raise problem.bad_request(message, param=f"{NAME}.{name}")
    return given


def merged(body: bytes, document: JsonObject, extra: JsonObject) -> bytes:
    """The body with `extra` beside its members and without `ext_params`; every other byte as it was."""
    if NAME in document:
        body = remove_member(body, NAME)
    for name, value in extra.items():
        body = replace_member(body, name, json.dumps(value))
    return body
