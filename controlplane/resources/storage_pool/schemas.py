"""What the API shows of storage pools."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from controlplane.api.schemas import Condition, Input, View


class StoragePoolReclaim(Input):
    """What to do about a pool that fills up."""

    dry_run: bool = Field(default=True, description="Only say what would be freed.", examples=[True])


class HeldView(View):
    id: str = Field(description="The volume or snapshot.", examples=["vol_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="Its name.", examples=["data-1"])
    project_id: str = Field(description="Its project.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    bytes: int = Field(description="What its end alone frees.", examples=[10737418240])
    purge_at: datetime | None = Field(description="When it would go by itself; null for snapshots.", examples=[None])


class ReclaimView(View):
    """What a reclaim frees, or would free."""

    dry_run: bool = Field(description="Whether nothing was done.", examples=[True])
    freed_bytes: int = Field(description="What the end of these volumes frees.", examples=[10737418240])
    volumes: list[HeldView] = Field(description="Deleted volumes whose data is only retained; they end now.", examples=[[]])
    snapshots: list[HeldView] = Field(description="The snapshots that hold most; they are left alone.", examples=[[]])


class StoragePoolView(View):
    """A place for volumes on one host."""

    id: str = Field(description="The id.", examples=["spool_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="Its name on the host; every host has `primary`.", examples=["primary"])
    host_id: str = Field(description="The host it is on.", examples=["host_01jd2x4k3fe8v9m2q7t5w0y6za"])
    host: str = Field(description="That host's name.", examples=["rack1-4"])
    total_bytes: int = Field(description="Its size.", examples=[4000787030016])
    free_bytes: int = Field(description="What is not written.", examples=[2500495958016])
    reserved_bytes: int = Field(description="What is promised to volumes and snapshots.", examples=[1073741824])
    allocatable_bytes: int = Field(
        description="What a new volume may take: a tenth of the pool is never promised.", examples=[2100417255014]
    )
    is_available: bool = Field(description="Whether the host sees it.", examples=[True])
    seen_at: datetime = Field(description="When the host last told of it.", examples=["2026-11-30T12:00:00Z"])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
    created_at: datetime = Field(description="When it was first seen.", examples=["2026-11-30T12:00:00Z"])
    updated_at: datetime = Field(description="When it last changed.", examples=["2026-11-30T12:00:00Z"])
