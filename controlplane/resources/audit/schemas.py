"""Bodies of the audit routes."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from controlplane.api.schemas import View


class AuditView(View):
    id: str = Field(description="The id.", examples=["aud_01jd2x4k3fe8v9m2q7t5w0y6za"])
    created_at: datetime = Field(description="When.", examples=["2026-11-30T12:00:00Z"])
    actor: str = Field(description="The token that did it.", examples=["tok_01jd2x4k3fe8v9m2q7t5w0y6za"])
    actor_name: str = Field(description="The token's name at that time.", examples=["ci"])
    action: str = Field(description="What was done.", examples=["vm.create"])
    project_id: str | None = Field(description="In which project.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    subject_kind: str = Field(description="To what kind of thing.", examples=["vm"])
    subject_id: str = Field(description="To which one.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    request_id: str = Field(description="By which request.", examples=["req_01jd2x4k3fe8v9m2q7t5w0y6za"])
    before: dict[str, object] | None = Field(description="The thing before, secrets masked.", examples=[None])
    after: dict[str, object] | None = Field(description="The thing afterwards, secrets masked.", examples=[{"name": "web-1"}])
