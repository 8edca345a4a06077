"""Changes of projects. The one rule: whatever has a foreign key to a project keeps it alive."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.core.json import Json
from controlplane.core.sealing import Sealer
from controlplane.kernel import service as kernel
from controlplane.models.project import Project
from controlplane.models.snapshot import Snapshot
from controlplane.models.volume import Volume
from controlplane.resources.project import keys, queries
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


async def rotate_key(session: AsyncSession, sealer: Sealer, project: Project) -> None:
    """A new key over the keys of all its volumes; hosts hear of it as they are reached. No data is written anew."""
    await session.refresh(project, with_for_update=True)
    await keys.rotate(session, sealer, project.id)
    for model, program in ((Volume, "volume"), (Snapshot, "snapshot")):
        changed = update(model).where(model.project_id == project.id, model.state.in_(["creating", "available", "retained"]))
        changed = changed.values(generation=model.generation + 1).returning(model.id, model.host_id)
        for row in (await session.execute(changed.execution_options(synchronize_session=False))).all():
            if row[1] is not None:
                await kernel.start(session, program, row[0], host_id=row[1])


async def delete(session: AsyncSession, project: Project) -> None:
    """Delete an empty project; raises ProjectNotEmpty."""
    await session.refresh(project, with_for_update=True)  # what is being put into it commits first, or sees that it is gone
    counts = await queries.contents(session, project.id)
    if counts:
        words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise ProjectNotEmpty(f"project {project.name} still has {words}", counts={**counts})
    await session.delete(project)
