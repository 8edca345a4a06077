"""Changes of projects. The one rule: whatever has a foreign key to a project keeps it alive."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.models.project import Project
from controlplane.resources.project import queries
from controlplane.resources.project.errors import ProjectNotEmpty


async def create(
    session: AsyncSession,
    *,
    name: str,
    description: str = "",
    labels: dict[str, Json] | None = None,
    allow_containers: bool = False,
    quota: Mapping[str, int | None] | None = None,
) -> Project:
    project = Project(
        id=new_id(Kind.PROJECT),
        name=name,
        description=description,
        labels=labels or {},
        allow_containers=allow_containers,
        quota=limits(quota),
    )
    session.add(project)
    await session.flush()
    return project


def limits(quota: Mapping[str, int | None] | None) -> dict[str, int]:
    """What is limited at all."""
    return {name: most for name, most in (quota or {}).items() if most is not None}


async def delete(session: AsyncSession, project: Project) -> None:
    """Delete an empty project; raises ProjectNotEmpty."""
    await session.refresh(project, with_for_update=True)  # what is being put into it commits first, or sees that it is gone
    counts = await queries.contents(session, project.id)
    if counts:
        words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise ProjectNotEmpty(f"project {project.name} still has {words}", counts={**counts})
    await session.delete(project)
