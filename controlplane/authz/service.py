"""Who may do what. The one rule: every operation passes `authorise(actor, action, resource)`, and what an actor may not
see answers like what does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.errors import Forbidden, NotFound

MEMBER_OUTSIDE_PROJECT = frozenset(
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
        "project.show",
        "token.current",
    }
)
"""What a member may do outside a project's path; the handlers show it only what is shared or its project's."""

MEMBER_NEVER = frozenset({"project.create", "project.update", "project.delete"})
"""What a member may not do even in its own project."""


class Role(StrEnum):
    OPERATOR = "operator"
    MEMBER = "member"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Who asks: the holder of a token, or a part of Bedplate itself."""

    id: str
    name: str
    role: Role
    project_id: str | None = None

    @property
    def is_operator(self) -> bool:
        return self.role is Role.OPERATOR


SYSTEM = Actor(id="system", name="bedplate", role=Role.OPERATOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """What an operation is about: in which project (None: the deployment), and whether it names one thing or a collection."""

    project_id: str | None = None
    is_named: bool = False


def authorise(actor: Actor, action: str, resource: Resource) -> None:
    """Return when `actor` may do `action`; raises NotFound for what it may not see, Forbidden for what it may see only."""
    if actor.is_operator:
        return
    if resource.project_id is None:
        if action in MEMBER_OUTSIDE_PROJECT:
            return
        if resource.is_named:
            raise NotFound
        raise Forbidden(f"{action} needs an operator token")
    if resource.project_id != actor.project_id:
        raise NotFound
    if action in MEMBER_NEVER:
        raise Forbidden(f"{action} needs an operator token")
