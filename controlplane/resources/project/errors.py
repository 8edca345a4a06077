"""Errors of projects."""

from __future__ import annotations

from controlplane.core.errors import Conflict, Forbidden, NotFound


class ProjectNotFound(NotFound):
    """No such project, or not yours to see; `bedplate project list` shows yours."""

    code = "project.not_found"
    title = "No such project"


class ProjectNameTaken(Conflict):
    """Another project has this name; names are unique in a deployment."""

    code = "project.name_taken"
    title = "The name is taken"
    constraint = "project_name_key"


class ProjectNotEmpty(Conflict):
    """The project still has resources; the context counts them by kind. Delete them first."""

    code = "project.not_empty"
    title = "The project is not empty"


class ProjectQuotaForbidden(Forbidden):
    """A project's quota is about the deployment's room: operators set it."""

    code = "project.quota_forbidden"
    title = "An operator sets quotas"


class ProjectContainersForbidden(Forbidden):
    """Containers share their host's kernel with other tenants: whether a project may run them is an operator's choice."""

    code = "project.containers_forbidden"
    title = "An operator allows containers"
