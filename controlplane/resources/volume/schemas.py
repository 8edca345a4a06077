"""What the API takes and shows of volumes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Progress, Resource, View, wrong_field

MIB = 1 << 20
MAX_BYTES = 1 << 46
MAX_RATE = 1 << 40

Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]
SizeBytes = Annotated[
    int, Field(ge=MIB, le=MAX_BYTES, multiple_of=MIB, description="Size; whole MiB, at least one.", examples=[10737418240])
]
Rate = Annotated[int, Field(ge=0, le=MAX_RATE)]
QueueSize = Annotated[
    int, Field(ge=32, le=1024, description="Requests that a queue holds: a power of two from 32 to 1024.", examples=[128])
]
NumQueues = Annotated[int, Field(ge=1, le=64, description="Queues between machine and storage.", examples=[1])]
RetentionHours = Annotated[
    int, Field(ge=0, le=8760, description="How long data is kept after a deletion; 0: not at all.", examples=[24])
]


class VolumeLimits(Input):
    """Limits of reads and writes together; 0: none."""

    iops: Rate = Field(default=0, description="Requests a second.", examples=[5000])
    bytes_per_second: Rate = Field(default=0, description="Bytes a second.", examples=[209715200])
    burst_iops: Rate = Field(default=0, description="Requests a second during a burst; 0: no burst.", examples=[10000])
    burst_bytes_per_second: Rate = Field(default=0, description="Bytes a second during a burst; 0: no burst.", examples=[0])
    burst_seconds: int = Field(default=1, ge=1, le=3600, description="Longest burst.", examples=[10])

    @model_validator(mode="after")
    def _bursts_are_faster(self) -> Self:
        for limit, burst in (("iops", "burst_iops"), ("bytes_per_second", "burst_bytes_per_second")):
            usual, most = getattr(self, limit), getattr(self, burst)
            if most and not usual:
                raise wrong_field(burst, f"a burst goes beyond {limit}, which is not limited")
            if most and most < usual:
                raise wrong_field(burst, f"must be at least {limit} ({usual})")
        return self


def _power_of_two(size: int) -> None:
    if size & (size - 1):
        raise wrong_field("queue_size", "must be a power of two")


class VolumeCreate(Input):
    """A new volume: empty, or as an image or a snapshot is."""

    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["The index"])
    labels: Labels = Field(default_factory=dict)
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[False])
    size_bytes: SizeBytes | None = Field(
        default=None, description="Left out: what image or snapshot needs.", examples=[10737418240]
    )
    image: Ref | None = Field(default=None, description="Begin as this image (name or id).", examples=[None])
    snapshot: Ref | None = Field(default=None, description="Begin as this snapshot (name or id): a clone.", examples=[None])
    vm: Ref | None = Field(default=None, description="Attach it to this VM at once (name or id).", examples=["web-1"])
    pool: Name = Field(default="primary", description="Name of the storage pool.", examples=["primary"])
    host: str = Field(
        default="", max_length=128, description="Exactly this host (name or id); operators only.", examples=["host-a"]
    )
    unlock: Literal["host", "control_plane"] = Field(
        default="host",
        description="Who opens it after its host's reboot: `host` by itself, or only this control plane.",
        examples=["host"],
    )
    limits: VolumeLimits = Field(default_factory=VolumeLimits, description="How fast it may be.", examples=[{"iops": 5000}])
    num_queues: NumQueues = 1
    queue_size: QueueSize = 128
    retention_hours: RetentionHours = 0

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if self.image is not None and self.snapshot is not None:
            raise wrong_field("snapshot", "begin as an image or as a snapshot, not both")
        if self.size_bytes is None and self.image is None and self.snapshot is None:
            raise wrong_field("size_bytes", "an empty volume needs a size")
        _power_of_two(self.queue_size)
        return self


class VolumeUpdate(Input):
    """Only the fields that are sent change."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["The index"])
    labels: Labels = Field(default_factory=dict)
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[True])
    limits: VolumeLimits = Field(
        default_factory=VolumeLimits, description="All limits anew; they hold at once.", examples=[{"iops": 5000}]
    )
    num_queues: NumQueues = Field(default=1, description="From the machine's next start.", examples=[4])
    queue_size: QueueSize = Field(default=128, description="From the machine's next start.", examples=[256])
    retention_hours: RetentionHours = Field(
        default=0, description="Also of a volume that is retained: counted from its deletion.", examples=[24]
    )

    @model_validator(mode="after")
    def _queue_is_whole(self) -> Self:
        _power_of_two(self.queue_size)
        return self


class VolumeGrow(Input):
    """A larger size."""

    size_bytes: SizeBytes


class VolumeAttach(Input):
    """Into which machine."""

    vm: Ref = Field(description="Name or id of a VM on the volume's host.", examples=["web-1"])
    delete_with_vm: bool = Field(default=False, description="Whether it goes when the VM is deleted.", examples=[False])


class LimitsView(View):
    iops: int = Field(description="Requests a second; 0: no limit.", examples=[5000])
    bytes_per_second: int = Field(description="Bytes a second; 0: no limit.", examples=[0])
    burst_iops: int = Field(description="Requests a second during a burst.", examples=[0])
    burst_bytes_per_second: int = Field(description="Bytes a second during a burst.", examples=[0])
    burst_seconds: int = Field(description="Longest burst.", examples=[1])


class VolumeWantedView(View):
    size_bytes: int = Field(description="Its size.", examples=[10737418240])
    limits: LimitsView = Field(description="How fast it may be.", examples=[{}])
    num_queues: int = Field(description="Queues between machine and storage.", examples=[1])
    queue_size: int = Field(description="Requests that a queue holds.", examples=[128])


class VolumeObservedView(View):
    state: str = Field(
        description="`idle`: no machine runs with it; `exported`: one does; `locked`: its key is missing; `failed`, `absent`; "
        "`unknown` until seen.",
        examples=["exported"],
    )
    host: str | None = Field(description="The host it lies on.", examples=["rack1-4"])
    size_bytes: int = Field(description="The size that the host has given it.", examples=[10737418240])
    takes_effect: str | None = Field(
        description="When the machine sees that size: `now`, or `after_reboot` of it; null: never told.", examples=["now"]
    )
    is_encrypted: bool | None = Field(description="Whether its data rests encrypted; null until told.", examples=[True])
    generation: int = Field(description="The generation that the host has carried out.", examples=[1])
    at: datetime | None = Field(description="When the host said so.", examples=["2026-11-30T12:00:00Z"])
    detail: dict[str, str | int | float | bool | None] = Field(description="More from the host.", examples=[{}])


class VolumeView(Resource):
    """A volume."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    description: str = Field(description="For people.", examples=["The index"])
    labels: Labels
    status: str = Field(
        description="One word: creating, available, attached, detaching, locked, failed, unreachable, retained or deleting.",
        examples=["attached"],
    )
    is_protected: bool = Field(description="Deletion is refused while true.", examples=[False])
    is_root: bool = Field(description="Whether it is the root disk of its VM.", examples=[False])
    image_id: str | None = Field(description="The image it began as.", examples=[None])
    snapshot_id: str | None = Field(description="The snapshot it began as.", examples=[None])
    vm_id: str | None = Field(description="The VM that has it.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    vm: str | None = Field(description="That VM's name.", examples=["web-1"])
    delete_with_vm: bool = Field(description="Whether it goes when that VM is deleted.", examples=[False])
    pool: str = Field(description="The storage pool it lies in.", examples=["primary"])
    backend: str = Field(description="What serves it: `qsd` or `spdk`.", examples=["qsd"])
    unlock: str = Field(description="Who opens it after its host's reboot: `host` or `control_plane`.", examples=["host"])
    size_bytes: int = Field(description="Its wanted size.", examples=[10737418240])
    takes_effect: str | None = Field(
        description="When the machine sees the last growth: `now` or `after_reboot`; null: the host has not said.",
        examples=["now"],
    )
    retention_hours: int = Field(description="How long data is kept after a deletion.", examples=[0])
    purge_at: datetime | None = Field(description="When a retained volume's data is destroyed.", examples=[None])
    wanted: VolumeWantedView = Field(description="What the last change asked for.", examples=[{}])
    observed: VolumeObservedView = Field(description="What the host last said.", examples=[{}])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
    progress: Progress | None = Field(description="What is being done just now; null at rest.", examples=[None])
