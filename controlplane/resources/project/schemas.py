"""Bodies of the project routes."""

from __future__ import annotations

from pydantic import Field

from controlplane.api.schemas import Input, Labels, Name, Resource


class Quota(Input):
    """By resource the most that a project may have, what is being deleted included; null: no limit."""

    vms: int | None = Field(default=None, ge=0, description="Machines, those of endpoints included.", examples=[20])
    vcpus: int | None = Field(default=None, ge=0, description="Virtual cores of all machines.", examples=[64])
    memory_bytes: int | None = Field(default=None, ge=0, description="Memory of all machines.", examples=[137438953472])
    volumes: int | None = Field(default=None, ge=0, description="Disks, machines' own included.", examples=[40])
    disk_bytes: int | None = Field(default=None, ge=0, description="Size of all disks together.", examples=[1099511627776])


class ProjectCreate(Input):
    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search team"])
    labels: Labels = Field(default_factory=dict)
    allow_containers: bool = Field(
        default=False,
        description="Whether workloads may run as containers, which isolate less than VMs.",
        examples=[False],
    )
    quota: Quota = Field(default_factory=Quota, description="Limits of what it may have.", examples=[{"vcpus": 64}])


class ProjectUpdate(Input):
    """Only the fields that are sent change."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search team"])
    labels: Labels = Field(default_factory=dict)
    allow_containers: bool = Field(default=False, description="Whether workloads may run as containers.", examples=[True])
    quota: Quota = Field(
        default_factory=Quota,
        description="Limits of what it may have; operators only. Replaces the whole quota.",
        examples=[{"vcpus": 64}],
    )


class ProjectView(Resource):
    description: str = Field(description="For people.", examples=["The search team"])
    labels: Labels
    allow_containers: bool = Field(description="Whether workloads may run as containers.", examples=[False])
    quota: dict[str, int] = Field(description="Limits by resource; what is not named has none.", examples=[{"vcpus": 64}])
