"""The decision itself, by Cedar over `policies.cedar`. The one rule: it depends on roles and names alone, so it is remembered.

An action stands in one group. What is not listed here is a `change` in a project and an operator's matter outside of one:
a new action is closed until somebody opens it.
"""

from __future__ import annotations

import functools
from importlib import resources

import cedarpy

READS = frozenset({"decisions", "export", "list", "log", "records", "revisions", "show"})
"""Second words of actions that only look."""

GOVERNS = frozenset(
    {
        "member.create",
        "member.update",
        "member.delete",
        "project.rotate-key",
        "project.update",
        "token.create",
        "token.delete",
    }
)
"""In a project: who else may do what there."""

OPERATES = frozenset({"project.delete"})
"""On a project, but about the deployment's room."""

SHARED = frozenset(
    {
        "event.list",
        "image.list",
        "image.show",
        "model.list",
        "model.show",
        "operation.list",
        "operation.show",
        "pool.list",
        "pool.show",
        "project.list",
        "token.current",
    }
)
"""Outside of a project, for everybody; the handlers show only what is shared or of the actor's projects."""

OWN = frozenset(
    {
        "login.approve",
        "login.deny",
        "login.show",
        "session.delete",
        "session.delete-current",
        "session.list",
        "session.show",
        "token.create",
        "token.delete",
        "token.list",
        "token.show",
        "user.confirm-totp",
        "user.current",
        "user.password",
        "user.remove-totp",
        "user.start-totp",
    }
)
"""Outside of a project, for people; the handlers show each their own."""

_CACHED_DECISIONS = 8192


def group(action: str, *, in_project: bool) -> str:
    """The group of an action: read, change, govern, shared, own, or operate."""
    if not in_project:
        return "shared" if action in SHARED else "own" if action in OWN else "operate"
    if action in GOVERNS:
        return "govern"
    if action in OPERATES:
        return "operate"
    return "read" if action.partition(".")[2] in READS else "change"


@functools.lru_cache(maxsize=_CACHED_DECISIONS)
def permits(roles: frozenset[str], action: str, *, in_project: bool, in_scope: bool) -> bool:
    """Whether an actor with these roles may do `action` on a project, or on the deployment."""
    kind = "Project" if in_project else "Deployment"
    answer = cedarpy.is_authorized(
        {
            "principal": {"type": "Actor", "id": "actor"},
            "action": {"type": "Action", "id": action},
            "resource": {"type": kind, "id": "it"},
            "context": {"in_scope": in_scope},
        },
        _policies(),
        [
            _entity("Role", "viewer"),
            _entity("Role", "editor", ("Role", "viewer")),
            _entity("Role", "admin", ("Role", "editor")),
            _entity("Actor", "actor", *(("Role", role) for role in sorted(roles))),
            _entity("Action", action, ("Action", group(action, in_project=in_project))),
            _entity(kind, "it"),
        ],
    )
    if answer.diagnostics.errors:
        raise RuntimeError(f"the policies cannot be evaluated: {'; '.join(answer.diagnostics.errors)}")
    return answer.allowed


def _entity(kind: str, name: str, *parents: tuple[str, str]) -> dict[str, object]:
    return {
        "uid": {"type": kind, "id": name},
        "attrs": {},
        "parents": [{"type": parent, "id": parent_name} for parent, parent_name in parents],
    }


@functools.cache
def _policies() -> cedarpy.PolicySet:
    return cedarpy.PolicySet.from_str(resources.files("controlplane.authz").joinpath("policies.cedar").read_text())
