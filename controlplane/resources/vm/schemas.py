"""What the API takes and shows of VMs."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Progress, Resource, View, wrong_field
from controlplane.resources.volume.schemas import VolumeCreate

MIB = 1 << 20
MAX_VCPUS = 512
MAX_MEMORY_BYTES = 1 << 46
MAX_DISK_BYTES = 1 << 46

SshKey = Annotated[str, StringConstraints(max_length=16384)]
UserName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")]
Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Vcpus = Annotated[int, Field(ge=1, le=MAX_VCPUS, description="Virtual cores.", examples=[2])]
MemoryBytes = Annotated[
    int,
    Field(
        ge=64 * MIB, le=MAX_MEMORY_BYTES, multiple_of=MIB, description="Memory; whole MiB, at least 64.", examples=[2147483648]
    ),
]
OnGuestPoweroff = Literal["stop", "restart"]


class PlacementSpec(Input):
    """Where the VM may go."""

    location: str = Field(default="", max_length=63, description="Only hosts at this location.", examples=["rack1"])
    host_labels: Labels = Field(default_factory=dict)
    host: str = Field(
        default="", max_length=128, description="Exactly this host (name or id); operators only.", examples=["host-a"]
    )


class VmVolume(Input):
    """A volume of the project that is in no VM (`volume`), or a new one (`name` and what it is)."""

    volume: Ref | None = Field(default=None, description="Name or id of a volume that exists.", examples=["data-1"])
    name: Name | None = Field(default=None, description="Name of a new volume.", examples=["data-2"])
    size_bytes: int | None = Field(
        default=None, ge=MIB, le=MAX_DISK_BYTES, multiple_of=MIB, description="Size of a new volume.", examples=[10737418240]
    )
    snapshot: Ref | None = Field(default=None, description="A new volume begins as this snapshot.", examples=[None])
    pool: Name = Field(default="primary", description="Storage pool of a new volume.", examples=["primary"])
    delete_with_vm: bool = Field(default=False, description="Whether it goes when the VM is deleted.", examples=[False])

    @model_validator(mode="after")
    def _is_old_or_new(self) -> Self:
        if (self.volume is None) == (self.name is None):
            raise wrong_field("volume", "give the name of a volume that exists, or a name for a new one")
        if self.volume is not None and self.model_fields_set & {"size_bytes", "snapshot", "pool"}:
            raise wrong_field("volume", "what exists has size, pool and content already")
        if self.name is not None and self.size_bytes is None and self.snapshot is None:
            raise wrong_field("size_bytes", "an empty volume needs a size")
        return self

    def as_volume(self) -> VolumeCreate:
        given = self.model_dump(include={"name", "size_bytes", "snapshot", "pool"}, exclude_unset=True)
        return VolumeCreate.model_validate(given)


class VmCreate(Input):
    """A new VM."""

    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search index"])
    labels: Labels = Field(default_factory=dict)
    image: Ref = Field(description="Name or id of an available image.", examples=["debian-12"])
    network: Ref = Field(description="Name or id of a network of the project.", examples=["default"])
    vcpus: Vcpus = 1
    memory_bytes: MemoryBytes = 1024 * MIB
    disk_bytes: int | None = Field(
        default=None,
        ge=MIB,
        le=MAX_DISK_BYTES,
        multiple_of=MIB,
        description="Size of the root disk; left out: what the image needs.",
        examples=[10737418240],
    )
    volumes: list[VmVolume] = Field(
        default_factory=list,
        max_length=15,
        description="Disks besides the root one; they outlive the VM unless they say otherwise.",
        examples=[[{"name": "data-1", "size_bytes": 10737418240}]],
    )
    user: UserName | None = Field(default=None, description="The login user; left out: the image's.", examples=["debian"])
    ssh_keys: list[SshKey] = Field(
        default_factory=list,
        max_length=64,
        description="Public keys that may log in as the user.",
        examples=[["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB0dHZ1bm5lZC1leGFtcGxlLWtleS1ieXRlcyE= me@here"]],
    )
    user_data: str = Field(
        default="",
        max_length=65536,
        description="cloud-init user data, or a script that runs at first boot; kept sealed, never shown again.",
        examples=["#!/bin/sh\ntouch /hello\n"],
    )
    power: Literal["running", "stopped"] = Field(
        default="running", description="Whether it starts at once.", examples=["running"]
    )
    on_guest_poweroff: OnGuestPoweroff = Field(
        default="stop", description="What to do when the guest powers itself off.", examples=["stop"]
    )
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[False])
    isolation: Literal["vm", "container"] = Field(
        default="vm",
        description="`vm` = a kernel of its own; `container` = weaker, only where the project allows it.",
        examples=["vm"],
    )
    placement: PlacementSpec = Field(
        default_factory=PlacementSpec, description="Where it may go.", examples=[{"location": "rack1"}]
    )
    on_no_capacity: Literal["fail", "wait"] = Field(
        default="fail",
        description="When no host fits: `fail` answers 507 and makes nothing, `wait` makes it and starts it when one does.",
        examples=["fail"],
    )


class VmUpdate(Input):
    """Only the fields that are sent change."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["The search index"])
    labels: Labels = Field(default_factory=dict)
    is_protected: bool = Field(default=False, description="Refuse deletion while true.", examples=[True])
    on_guest_poweroff: OnGuestPoweroff = Field(
        default="stop", description="What to do when the guest powers itself off.", examples=["restart"]
    )


class VmResize(Input):
    """A new size. A running VM gets it at its next restart or start."""

    vcpus: Vcpus | None = Field(default=None, description="Virtual cores; left out: as before.", examples=[4])
    memory_bytes: MemoryBytes | None = Field(default=None, description="Memory; left out: as before.", examples=[4294967296])


class NicView(View):
    """An interface of a VM."""

    id: str = Field(description="The interface's id.", examples=["nic_01jd2x4k3fe8v9m2q7t5w0y6za"])
    network_id: str = Field(description="Its network.", examples=["net_01jd2x4k3fe8v9m2q7t5w0y6za"])
    mac: str = Field(description="Its hardware address.", examples=["02:be:0a:c0:00:02"])
    ipv4: IPv4Address = Field(description="Its IPv4 address, unique in the deployment.", examples=["10.192.0.2"])
    ipv6: IPv6Address = Field(description="Its IPv6 address, unique in the deployment.", examples=["fd4e:1b2c:3d4f::2"])


class VmWantedView(View):
    """What was asked for."""

    power: str = Field(description="`running` or `stopped`.", examples=["running"])
    vcpus: int = Field(description="Virtual cores.", examples=[2])
    memory_bytes: int = Field(description="Memory.", examples=[2147483648])
    disk_bytes: int = Field(description="Size of the root disk.", examples=[10737418240])
    on_guest_poweroff: str = Field(description="What to do when the guest powers itself off.", examples=["stop"])
    restart_generation: int = Field(description="Counts the restarts that were asked for.", examples=[0])


class VmObservedView(View):
    """What is. Everything here was reported by the host."""

    power: str = Field(description="`unknown`, `running`, `stopped`, `failed` or `absent`.", examples=["running"])
    vcpus: int = Field(description="Virtual cores since the last start.", examples=[2])
    memory_bytes: int = Field(description="Memory since the last start.", examples=[2147483648])
    host: str | None = Field(description="Name of the host; null while it waits for one.", examples=["host-a"])
    driver: str | None = Field(description="What runs it there.", examples=["qemu"])
    generation: int = Field(description="The generation that the host has carried out.", examples=[1])
    at: datetime | None = Field(description="When the host said so.", examples=["2026-11-30T12:00:00Z"])
    started_at: datetime | None = Field(description="When it was first seen running since its last start.", examples=[None])
    detail: dict[str, str | int | float | bool | None] = Field(description="More from the host.", examples=[{}])


class VmView(Resource):
    """A VM."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    description: str = Field(description="For people.", examples=["The search index"])
    labels: Labels
    status: str = Field(
        description="One word: waiting, preparing, running, stopping, stopped, failed, unreachable or deleting.",
        examples=["running"],
    )
    is_protected: bool = Field(description="Deletion is refused while true.", examples=[False])
    image_id: str = Field(description="The image of the root disk.", examples=["img_01jd2x4k3fe8v9m2q7t5w0y6za"])
    image: str = Field(description="The image's name.", examples=["debian-12"])
    isolation: str = Field(description="`vm` = a kernel of its own; `container` = weaker.", examples=["vm"])
    user: str = Field(description="The login user.", examples=["debian"])
    ssh_keys: list[str] = Field(description="Public keys that may log in.", examples=[[]])
    ipv4: IPv4Address | None = Field(description="The first interface's IPv4 address.", examples=["10.192.0.2"])
    ipv6: IPv6Address | None = Field(description="The first interface's IPv6 address.", examples=["fd4e:1b2c:3d4f::2"])
    nics: list[NicView] = Field(description="Its interfaces.", examples=[[]])
    root_volume_id: str | None = Field(description="The root disk.", examples=["vol_01jd2x4k3fe8v9m2q7t5w0y6za"])
    volume_ids: list[str] = Field(
        description="All its disks, the root one first.", examples=[["vol_01jd2x4k3fe8v9m2q7t5w0y6za"]]
    )
    wanted: VmWantedView = Field(description="What the last change asked for.", examples=[{}])
    observed: VmObservedView = Field(description="What the host last said.", examples=[{}])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
    progress: Progress | None = Field(description="What is being done just now; null at rest.", examples=[None])
