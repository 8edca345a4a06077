"""Bodies of the member routes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from controlplane.api.schemas import Input, View

ProjectRole = Annotated[
    Literal["admin", "editor", "viewer"],
    Field(description="`viewer` looks, `editor` also changes, `admin` also says who is a member.", examples=["editor"]),
]


class MemberCreate(Input):
    user: str = Field(max_length=128, description="Name or id of the person.", examples=["ada@example.org"])
    role: ProjectRole


class MemberUpdate(Input):
    role: ProjectRole


class MemberView(View):
    id: str = Field(description="The id.", examples=["mem_01jd2x4k3fe8v9m2q7t5w0y6za"])
    project_id: str = Field(description="The project.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    user_id: str = Field(description="The person.", examples=["user_01jd2x4k3fe8v9m2q7t5w0y6za"])
    user_name: str = Field(description="The person's name.", examples=["ada@example.org"])
    role: ProjectRole
    generation: int = Field(description="Counts the changes; also the ETag.", examples=[1])
    created_at: datetime = Field(description="When it was made.", examples=["2026-12-01T12:00:00Z"])
