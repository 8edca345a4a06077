"""What a route's rules say of one request: which targets, and what keeps it at one replica.

The one rule: rules are read in order and the first that matches decides; the route's own targets (`default`) match everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.gateway.call import Call
from controlplane.gateway.directory import Match, RouteEntry, Target

DEFAULT = "default"
_BEGINNINGS = (b'"messages"', b'"prompt"', b'"input"')


def targets_of(route: RouteEntry, call: Call, *, is_stream: bool, prompt_tokens: int) -> tuple[str, Sequence[Target]]:
    """The name of the rule that decides, and its targets."""
    for rule in route.rules:
        if matches(rule.match, call, is_stream=is_stream, prompt_tokens=prompt_tokens):
            return rule.name, rule.targets
    return DEFAULT, route.targets


def matches(match: Match, call: Call, *, is_stream: bool, prompt_tokens: int) -> bool:
    labels = call.key.labels if call.key is not None else {}
    if any(labels.get(name) != value for name, value in match.key_labels):
        return False
    if match.modalities and call.family.modality not in match.modalities:
        return False
    if match.is_stream is not None and match.is_stream is not is_stream:
        return False
    if match.least_prompt_tokens is not None and prompt_tokens < match.least_prompt_tokens:
        return False
    if match.most_prompt_tokens is not None and prompt_tokens > match.most_prompt_tokens:
        return False
    return all(call.header(name) == value for name, value in match.headers)


def affinity_of(route: RouteEntry, call: Call, body: bytes) -> bytes:
    """What requests of one kind share; empty = any replica will do."""
    affinity = route.affinity
    if affinity.kind == "session":
        return call.header(affinity.header) or b""
    if affinity.kind == "prefix":
        start = min((place for word in _BEGINNINGS if (place := body.find(word)) >= 0), default=-1)
        return b"" if start < 0 else body[start : start + affinity.prefix_bytes]
    return b""
