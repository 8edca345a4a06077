"""Changes of tokens. The one rule: nobody gives a token more than they have, and its plain text is in the answer of the
request that made it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Actor, Resource, Role, authorise
from controlplane.core.errors import FieldError, Forbidden, NotFound
from controlplane.identity.service import NewToken, new_token
from controlplane.resources.project.errors import ProjectNotFound
from controlplane.resources.token import queries
from controlplane.resources.token.errors import TokenExpiryInvalid, TokenRoleForbidden, TokenRoleInvalid, TokenScopeInvalid

_WITHOUT_PROJECT = frozenset({Role.OPERATOR, Role.USER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The token somebody asks for; `project` is a name or an id."""

    name: str
    role: Role
    project: str | None
    scopes: Sequence[str]
    expires_at: datetime | None


async def create(session: AsyncSession, actor: Actor, asked: Asked, now: datetime) -> NewToken:
    """A token; raises TokenRoleInvalid, TokenRoleForbidden, TokenScopeInvalid, TokenExpiryInvalid, ProjectNotFound."""
    if (asked.role in _WITHOUT_PROJECT) != (asked.project is None):
        wanted = "belongs to no project" if asked.role in _WITHOUT_PROJECT else "needs a project"
        wrong = FieldError(pointer="/project", detail=f"the role {asked.role} {wanted}")
        raise TokenRoleInvalid(wrong.detail, errors=(wrong,))
    if asked.expires_at is not None and asked.expires_at <= now:
        raise TokenExpiryInvalid(errors=(FieldError(pointer="/expires_at", detail="lies in the past"),))
    if actor.expires_at is not None and (asked.expires_at is None or asked.expires_at > actor.expires_at):
        words = f"your own token ends at {actor.expires_at.isoformat()}: give none that lives longer"
        raise TokenExpiryInvalid(words, errors=(FieldError(pointer="/expires_at", detail=words),))
    if actor.scopes and not (asked.scopes and set(asked.scopes) <= set(actor.scopes)):
        words = f"your own token is narrowed to {', '.join(actor.scopes)}: give one or more of these"
        raise TokenScopeInvalid(words, errors=(FieldError(pointer="/scopes", detail=words),))
    project_id = None if asked.project is None else await _project_id(session, actor, asked.project)
    if asked.role is Role.OPERATOR and not actor.is_operator:
        raise TokenRoleForbidden("an operator makes operator tokens")
    if asked.role is Role.USER and actor.user_id is None:
        raise TokenRoleInvalid("a token of no person makes no personal token")
    made = new_token(
        name=asked.name,
        role=asked.role,
        project_id=project_id,
        user_id=actor.user_id if asked.role is Role.USER else None,
        maker_id=actor.user_id or await queries.maker_id(session, actor.id),
        scopes=asked.scopes,
        expires_at=asked.expires_at,
    )
    session.add(made.row)
    await session.flush()
    return made


async def _project_id(session: AsyncSession, actor: Actor, ref: str) -> str:
    """The project in which the actor may make tokens."""
    row = await queries.project(session, ref)
    unknown = ProjectNotFound(f"no project {ref}", errors=(FieldError(pointer="/project", detail="no such project"),))
    if row is None:
        raise unknown
    try:
        authorise(actor, "token.create", Resource(project_id=row.id))
    except NotFound as error:
        raise unknown from error
    except Forbidden as error:
        raise TokenRoleForbidden(error.detail) from error
    return row.id
