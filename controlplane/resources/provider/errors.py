"""Errors of providers."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class ProviderNotFound(NotFound):
    """No such provider; `bedplate provider list` shows them."""

    code = "provider.not_found"
    title = "No such provider"


class ProviderNameTaken(Conflict):
    """Another provider has this name."""

    code = "provider.name_taken"
    title = "The name is taken"
    constraint = "provider_name_idx"


class ProviderInUse(Conflict):
    """Routes lead to it; change them first."""

    code = "provider.in_use"
    title = "The provider is in use"
    constraint = "route_provider_provider_id_fkey"


class ProviderProjectUnknown(InvalidInput):
    """One of `projects` is no project."""

    code = "provider.project_unknown"
    title = "No such project"
