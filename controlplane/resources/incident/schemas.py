"""Bodies of the incident routes."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from controlplane.api.pages import PageQuery
from controlplane.api.schemas import Input, View


class IncidentPage(PageQuery):
    state: Literal["open", "resolved"] | None = Field(default=None, description="Only those in this state.", examples=["open"])


class IncidentResolve(Input):
    resume: bool = Field(default=True, description="Also let the parked run try again.", examples=[True])


class IncidentView(View):
    id: str = Field(description="The id.", examples=["inc_01jd2x4k3fe8v9m2q7t5w0y6za"])
    state: str = Field(description="`open` or `resolved`.", examples=["open"])
    code: str = Field(description="What is wrong, to program against.", examples=["host.unreachable"])
    detail: str = Field(description="What is wrong, in words.", examples=["rack1-4 refuses SSH: connection refused"])
    subject: str = Field(description="What it is about.", examples=["host_01jd2x4k3fe8v9m2q7t5w0y6za"])
    run_id: str | None = Field(description="The run that met it.", examples=["run_01jd2x4k3fe8v9m2q7t5w0y6za"])
    program: str | None = Field(description="The run's program.", examples=["host"])
    step: str | None = Field(description="The step it was in.", examples=["connect"])
    context: dict[str, object] = Field(description="Facts to decide by.", examples=[{}])
    count: int = Field(description="How often it happened.", examples=[3])
    first_at: datetime = Field(description="The first time.", examples=["2026-11-30T12:00:00Z"])
    last_at: datetime = Field(description="The last time.", examples=["2026-11-30T12:05:00Z"])
    resolved_at: datetime | None = Field(description="When it was resolved.", examples=[None])
    resolved_by: str | None = Field(description="Who resolved it.", examples=[None])
