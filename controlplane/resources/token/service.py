"""Changes of tokens. The one rule: the plain text is in the answer of the request that made it, and nowhere else."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.authz.service import Role
from controlplane.core.errors import FieldError
from controlplane.identity.service import NewToken, new_token
from controlplane.resources.project.errors import ProjectNotFound
from controlplane.resources.token import queries
from controlplane.resources.token.errors import TokenExpiryInvalid, TokenRoleInvalid


async def create(
    session: AsyncSession, *, name: str, role: str, project: str | None, expires_at: datetime | None, now: datetime
) -> NewToken:
    """A token; raises TokenRoleInvalid, TokenExpiryInvalid, ProjectNotFound."""
    if (role == Role.MEMBER) != (project is not None):
        wanted = "needs a project" if role == Role.MEMBER else "belongs to no project"
        wrong = FieldError(pointer="/project", detail=f"the role {role} {wanted}")
        raise TokenRoleInvalid(wrong.detail, errors=(wrong,))
    if expires_at is not None and expires_at <= now:
        raise TokenExpiryInvalid(errors=(FieldError(pointer="/expires_at", detail="lies in the past"),))
    project_id = None
    if project is not None:
        row = await queries.project(session, project)
        if row is None:
            raise ProjectNotFound(f"no project {project}", errors=(FieldError(pointer="/project", detail="no such project"),))
        project_id = row.id
    made = new_token(name=name, role=Role(role), project_id=project_id, expires_at=expires_at)
    session.add(made.row)
    await session.flush()
    return made
