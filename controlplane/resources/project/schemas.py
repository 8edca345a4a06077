"""Bodies of the project routes."""

from __future__ import annotations

from pydantic import Field

from controlplane.api.schemas import Input, Labels, Name, Resource


class ProjectCreate(Input):
    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search team"])
    labels: Labels = Field(default_factory=dict)
    allow_containers: bool = Field(
        default=False,
        description="Whether workloads may run as containers, which isolate less than VMs.",
        examples=[False],
    )


class ProjectUpdate(Input):
    """Only the fields that are sent change."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search team"])
    labels: Labels = Field(default_factory=dict)
    allow_containers: bool = Field(default=False, description="Whether workloads may run as containers.", examples=[True])


class ProjectView(Resource):
    description: str = Field(description="For people.", examples=["The search team"])
    labels: Labels
    allow_containers: bool = Field(description="Whether workloads may run as containers.", examples=[False])
