"""Bodies of the operation routes."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from controlplane.api.schemas import View


class StepView(View):
    name: str = Field(description="The step of the subject's program.", examples=["prepare"])
    state: str = Field(
        description="`running`, `done`, `failed` (it cannot go on) or `cut` (a delete came between).", examples=["running"]
    )
    started_at: datetime = Field(description="Since when.", examples=["2026-11-30T12:00:00Z"])
    finished_at: datetime | None = Field(
        default=None, description="Until when; null while it runs.", examples=["2026-11-30T12:00:07Z"]
    )
    attempt: int = Field(description="Which try it is, or was; looking again at what takes time is not one.", examples=[1])
    deadline_at: datetime | None = Field(
        default=None, description="By when it must be left, while it runs.", examples=["2026-11-30T12:10:00Z"]
    )
    error_code: str | None = Field(
        default=None, description="Code of what the last failed try died of.", examples=["host.unreachable"]
    )
    error: str | None = Field(default=None, description="What it died of, in words.", examples=["rack1-4 did not answer"])


class OperationView(View):
    id: str = Field(description="The id.", examples=["op_01jd2x4k3fe8v9m2q7t5w0y6za"])
    action: str = Field(description="What was asked for.", examples=["vm.create"])
    state: str = Field(description="`running`, `succeeded`, `failed` or `superseded`.", examples=["succeeded"])
    project_id: str | None = Field(description="The project of the subject.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    subject_kind: str = Field(description="The noun of the subject.", examples=["vm"])
    subject_id: str = Field(description="The subject.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    subject_generation: int = Field(description="The generation that the change made.", examples=[1])
    actor: str = Field(description="The token that asked.", examples=["tok_01jd2x4k3fe8v9m2q7t5w0y6za"])
    error_code: str | None = Field(description="Why it failed, to program against.", examples=["image.digest_mismatch"])
    error_detail: str | None = Field(description="Why it failed, in words.", examples=["The download was cut at 3 MB."])
    steps: list[StepView] = Field(
        default_factory=list, description="What the subject's run has done and is doing.", examples=[[]]
    )
    created_at: datetime = Field(description="When it was asked for.", examples=["2026-11-30T12:00:00Z"])
    finished_at: datetime | None = Field(description="When it ended.", examples=["2026-11-30T12:00:07Z"])
