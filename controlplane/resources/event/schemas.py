"""The form of an event in the stream."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from controlplane.api.schemas import View


class EventView(View):
    id: str = Field(description="The id.", examples=["evt_01jd2x4k3fe8v9m2q7t5w0y6za"])
    position: int = Field(description="Its place in the stream; give it as `after` to go on behind it.", examples=[4711])
    kind: str = Field(description="What happened.", examples=["vm.create"])
    project_id: str | None = Field(description="The project, when it has one.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    subject_kind: str = Field(description="The noun it happened to.", examples=["vm"])
    subject_id: str = Field(description="The thing it happened to.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    created_at: datetime = Field(description="When it was written.", examples=["2026-11-30T12:00:00Z"])
    body: dict[str, object] = Field(description="More about it.", examples=[{"name": "web-1"}])
