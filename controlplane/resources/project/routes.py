"""`/v1/projects`: the example of a noun's routes."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.project import Project
from controlplane.resources.project import service
from controlplane.resources.project.errors import (
    ProjectContainersForbidden,
    ProjectNameTaken,
    ProjectNotEmpty,
    ProjectNotFound,
    ProjectQuotaForbidden,
)
from controlplane.resources.project.schemas import ProjectCreate, ProjectUpdate, ProjectView

noun = Noun("project", "projects", in_project=False, has_operations=False)
router = noun.router


@noun.create(ProjectView, errors=[ProjectNameTaken])
async def create(call: Call, body: ProjectCreate) -> Project:
    """Make a project: the wall between tenants."""
    return await service.create(call.session, **body.model_dump())


@noun.list(ProjectView)
async def list_(call: Call, page: Page) -> PageOf[Project]:
    """List the projects you may see."""
    return await call.page(Project, page)


@noun.show(ProjectView, errors=[ProjectNotFound])
async def show(call: Call, project: Ref) -> Project:
    """Show one project."""
    return await call.load(Project, project)


@noun.update(ProjectView, errors=[ProjectNotFound, ProjectQuotaForbidden, ProjectContainersForbidden])
async def update(call: Call, project: Ref, body: ProjectUpdate) -> Project:
    """Change the fields that are sent."""
    row = await call.load(Project, project)
    changes = body.model_dump(exclude_unset=True)
    if "quota" in changes:
        if not call.actor.is_operator:
            raise ProjectQuotaForbidden
        changes["quota"] = service.limits(changes["quota"])
    if "allow_containers" in changes and not call.actor.is_operator:
        raise ProjectContainersForbidden
    for name, value in changes.items():
        setattr(row, name, value)
    return row


@noun.action("rotate-key", ProjectView, errors=[ProjectNotFound])
async def rotate_key(call: Call, project: Ref) -> Project:
    """Put a new key over the keys of the project's volumes and destroy the old one. No data is written anew."""
    row = await call.load(Project, project)
    await service.rotate_key(call.session, call.services.sealer, row)
    return row


@noun.delete(ProjectView, errors=[ProjectNotEmpty])
async def delete(call: Call, project: Ref) -> None:
    """Delete an empty project."""
    await service.delete(call.session, await call.load(Project, project))
