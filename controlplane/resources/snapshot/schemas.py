"""What the API takes and shows of snapshots."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field, StringConstraints

from controlplane.api.schemas import Condition, Input, Labels, Name, Progress, Resource, View

Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class SnapshotTake(Input):
    """A snapshot of the volume in the path."""

    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["Before the upgrade"])
    labels: Labels = Field(default_factory=dict)
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[False])


class SnapshotCreate(SnapshotTake):
    """A new snapshot of a volume, as it is now."""

    volume: Ref = Field(description="Name or id of an available volume.", examples=["data-1"])


class SnapshotUpdate(Input):
    """Only the fields that are sent change."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["Before the upgrade"])
    labels: Labels = Field(default_factory=dict)
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[True])


class SnapshotWantedView(View):
    volume_id: str = Field(description="The volume it is of.", examples=["vol_01jd2x4k3fe8v9m2q7t5w0y6za"])
    size_bytes: int = Field(description="The volume's size at that moment.", examples=[10737418240])


class SnapshotObservedView(View):
    state: str = Field(description="`creating`, `available` or `deleting`.", examples=["available"])
    taken_at: datetime | None = Field(description="The moment it shows.", examples=["2026-11-30T12:00:00Z"])
    consistency: str | None = Field(
        description="`crash`: as after a power cut; `frozen`: the guest held its file systems still.", examples=["crash"]
    )
    host: str = Field(description="The host it lies on.", examples=["rack1-4"])
    generation: int = Field(description="The generation that the host has carried out.", examples=[1])


class SnapshotView(Resource):
    """A snapshot."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    description: str = Field(description="For people.", examples=["Before the upgrade"])
    labels: Labels
    status: str = Field(description="creating, available, failed or deleting.", examples=["available"])
    is_protected: bool = Field(description="Deletion is refused while true.", examples=[False])
    volume_id: str = Field(description="The volume it is of; it may be gone.", examples=["vol_01jd2x4k3fe8v9m2q7t5w0y6za"])
    volume: str = Field(description="That volume's name when it was taken.", examples=["data-1"])
    size_bytes: int = Field(description="A clone has at least this size.", examples=[10737418240])
    pool: str = Field(description="The pool it lies in.", examples=["primary"])
    wanted: SnapshotWantedView = Field(description="What was asked for.", examples=[{}])
    observed: SnapshotObservedView = Field(description="What the host last said.", examples=[{}])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
    progress: Progress | None = Field(description="What is being done just now; null at rest.", examples=[None])
