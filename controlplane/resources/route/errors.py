"""Errors of routes."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class RouteNotFound(NotFound):
    """No such route in this project; `bedplate route list` shows them."""

    code = "route.not_found"
    title = "No such route"


class RouteNameTaken(Conflict):
    """Another route of the project has this public model name."""

    code = "route.name_taken"
    title = "The name is taken"
    constraint = "route_project_id_name_idx"


class RouteTargetInvalid(InvalidInput):
    """A target names no endpoint of this project, or one twice."""

    code = "route.target_invalid"
    title = "A target of the route is not valid"
