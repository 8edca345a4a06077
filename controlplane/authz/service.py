"""Who may do what. The one rule: every operation passes `authorise(actor, action, resource)`, and what an actor may not
see answers like what does not exist.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from controlplane.authz import policy
from controlplane.core.errors import Forbidden, NotFound


class Role(StrEnum):
    """What a token says of its holder; `admin`, `editor` and `viewer` are also what a person is in a project."""

    OPERATOR = "operator"
    ADMIN = "admin"
    EDITOR = "editor"
    VIEWER = "viewer"
    MEMBER = "member"  # the old word for editor
    USER = "user"  # a personal token: what its person may do

    @property
    def in_project(self) -> Role:
        """The role that the policies know."""
        return Role.EDITOR if self is Role.MEMBER else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks: a person, the holder of a token, or a part of Bedplate itself.

    `roles` by project id; `scopes` are patterns of actions that a token is narrowed to, empty for none;
    `expires_at` is when the token ends.
    """

    id: str
    name: str
    is_operator: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict[str, Role])
    scopes: tuple[str, ...] = ()
    user_id: str | None = None
    session_id: str | None = None
    expires_at: datetime | None = None

    @property
    def project_ids(self) -> tuple[str, ...]:
        return tuple(self.roles)

    def roles_in(self, project_id: str | None) -> frozenset[str]:
        """The roles for an operation in that project, or in none."""
        found = {"operator"} if self.is_operator else set[str]()
        if self.user_id is not None:
            found.add("person")
        if project_id is not None and project_id in self.roles:
            found.add(self.roles[project_id].in_project.value)
        return frozenset(found)

    def is_in_scope(self, action: str) -> bool:
        return not self.scopes or any(fnmatch.fnmatchcase(action, pattern) for pattern in self.scopes)


SYSTEM = Actor(id="system", name="bedplate", is_operator=True)
ANONYMOUS = Actor(id="anonymous", name="anonymous")
"""Who signs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What an operation is about: in which project (None: the deployment), and whether it names one thing or a collection."""

    project_id: str | None = None
    is_named: bool = False


def authorise(actor: Actor, action: str, resource: Resource) -> None:
    """Return when `actor` may do `action`; raises NotFound for what it may not see, Forbidden for what it may see only."""
    in_project = resource.project_id is not None
    roles, in_scope = actor.roles_in(resource.project_id), actor.is_in_scope(action)
    if policy.permits(roles, action, in_project=in_project, in_scope=in_scope):
        return
    if in_project and not actor.is_operator and resource.project_id not in actor.roles:
        raise NotFound
    if not in_scope:
        raise Forbidden(f"{action} is not in this token's scopes: {', '.join(actor.scopes)}")
    if not in_project and resource.is_named:
        raise NotFound
    raise Forbidden(_needs(roles, action, in_project=in_project))


def _needs(roles: frozenset[str], action: str, *, in_project: bool) -> str:
    """Who could do it, in words."""
    able = [
        role
        for role in ("viewer", "editor", "admin")
        if policy.permits(frozenset({role}), action, in_project=True, in_scope=True)
    ]
    if not in_project or not able:
        return f"{action} needs an operator"
    mine = ", ".join(sorted(roles - {"person"}))
    return f"{action} needs the role {able[0]} in this project; yours is {mine}"
