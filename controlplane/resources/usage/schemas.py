"""Bodies of the usage routes."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, AwareDatetime, Field, field_validator

from controlplane.api.schemas import View
from controlplane.core.money import text_of


def as_money(value: Any) -> Any:
    return value if isinstance(value, str) else text_of(int(value))


class UsageView(View):
    """Sums of one hour (or of the whole time asked for), one key and one model."""

    hour: AwareDatetime | None = Field(description="The hour (UTC); null in totals.", examples=["2026-11-30T12:00:00Z"])
    model: str = Field(description="The public model name.", examples=["smollm2"])
    key_id: str = Field(description="The key; it may be revoked by now.", examples=["key_01jd2x4k3fe8v9m2q7t5w0y6za"])
    key: str | None = Field(description="The key's name while it exists.", examples=["app"])
    requests: int = Field(description="Requests that reached a replica.", examples=[12])
    prompt_tokens: int = Field(description="Billed prompt tokens.", examples=[480])
    completion_tokens: int = Field(description="Billed tokens of answers.", examples=[1920])
    cached_tokens: int = Field(description="Prompt tokens that came from the engine's cache.", examples=[256])
    cost: str = Field(
        validation_alias=AliasChoices("cost_micros", "cost"),
        description="By the price book, in the deployment's currency.",
        examples=["0.001512"],
    )
    estimated_requests: int = Field(description="Requests whose tokens were counted by the gateway.", examples=[0])
    unbilled_requests: int = Field(description="Requests that are not billed: refused, or lost by the replica.", examples=[0])

    _as_text = field_validator("cost", mode="before")(as_money)


class UsageList(View):
    items: list[UsageView] = Field(description="By hour, model and key.", examples=[[]])
    next_page_token: str | None = Field(
        default=None, description="Always null: the time asked for bounds the list.", examples=[None]
    )


class UsageRecordView(View):
    """One request that reached a replica."""

    request_id: str = Field(description="The `x-request-id` of its answer.", examples=["req_01jd2x4k3fe8v9m2q7t5w0y6za"])
    model: str = Field(description="The public model name.", examples=["smollm2"])
    key_id: str = Field(description="The key.", examples=["key_01jd2x4k3fe8v9m2q7t5w0y6za"])
    endpoint_id: str = Field(description="The endpoint.", examples=["ep_01jd2x4k3fe8v9m2q7t5w0y6za"])
    replica_id: str = Field(description="The replica.", examples=["rep_01jd2x4k3fe8v9m2q7t5w0y6za"])
    path: str = Field(description="The API's path.", examples=["/v1/chat/completions"])
    is_stream: bool = Field(description="Whether the answer was streamed.", examples=[True])
    started_at: AwareDatetime = Field(description="When it was sent to a replica.", examples=["2026-11-30T12:00:00Z"])
    ended_at: AwareDatetime = Field(description="When it ended.", examples=["2026-11-30T12:00:02Z"])
    outcome: str = Field(
        description="`completed`, `client_closed`, `upstream_died`, `refused`, `timed_out` or `gateway_died`.",
        examples=["completed"],
    )
    status: int = Field(description="The HTTP status; 499: the client left.", examples=[200])
    prompt_tokens: int = Field(description="Tokens of the prompt.", examples=[40])
    completion_tokens: int = Field(description="Tokens of the answer.", examples=[160])
    cached_tokens: int = Field(description="Of the prompt's, from the engine's cache.", examples=[0])
    served_model: str = Field(description="The catalogue's name of what answered.", examples=["smollm2-135m-instruct"])
    cost: str = Field(
        validation_alias=AliasChoices("cost_micros", "cost"), description="By the price book.", examples=["0.000021"]
    )
    is_estimated: bool = Field(description="Counted by the gateway, not told by the engine.", examples=[False])
    is_billable: bool = Field(description="Whether it counts in the sums of tokens.", examples=[True])
    first_token_ms: int | None = Field(description="Milliseconds to the first token of a stream.", examples=[83])

    _as_text = field_validator("cost", mode="before")(as_money)


class UsageRecordList(View):
    items: list[UsageRecordView] = Field(description="The latest first.", examples=[[]])
    next_page_token: str | None = Field(default=None, description="Always null: `limit` bounds the list.", examples=[None])
