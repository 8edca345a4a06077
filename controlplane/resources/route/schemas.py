"""Bodies of the route routes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, StringConstraints

from controlplane.api.schemas import Input, Resource, View
from controlplane.core.json import Json

PublicName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"),
    Field(description="The model name that applications send: letters, digits and . _ : / -", examples=["smollm2"]),
]


class RouteTargetIn(Input):
    endpoint: str = Field(
        max_length=128,
        validation_alias=AliasChoices("endpoint", "model"),
        description="Name or id of an endpoint of the project, the model that exactly one of its endpoints serves, or the "
        "model of a provider outside, as `provider/model`.",
        examples=["chat"],
    )
    weight: int = Field(default=1, ge=0, le=1000, description="Share of the requests, relative to the others.", examples=[1])
    fallback: str | None = Field(
        default=None,
        max_length=128,
        description="The endpoint or provider's model for what this one cannot answer: no connection, 5xx, nothing ready.",
        examples=["chat-small"],
    )


class RetryPolicy(Input):
    """Replicas that cannot be connected to do not count: another one is tried at once."""

    max_attempts: int = Field(
        default=3, ge=1, le=10, description="Attempts before the first byte, the first included.", examples=[3]
    )
    backoff: Annotated[str, StringConstraints(pattern=r"^([0-9]{1,5}ms|[0-9]{1,2}(\.[0-9]{1,3})?s)$")] = Field(
        default="0ms",
        description="Wait before the second attempt; doubles, with jitter. With one, a single replica is tried again too.",
        examples=["200ms"],
    )

    def stored(self) -> dict[str, Json]:
        number = float(self.backoff.removesuffix("s").removesuffix("m"))
        return {"max_attempts": self.max_attempts, "backoff_ms": round(number * (1 if self.backoff.endswith("ms") else 1000))}


class Affinity(Input):
    """Keeps requests of one kind at one replica, unless that has a quarter more in flight than the others."""

    kind: Literal["none", "prefix", "session"] = Field(
        default="none",
        description="`prefix`: prompts that begin alike; `session`: requests with the same header.",
        examples=["prefix"],
    )
    header: Annotated[str, StringConstraints(pattern=r"^[a-z0-9-]{1,64}$", to_lower=True)] = Field(
        default="x-session-id", description="The header that names a session.", examples=["x-session-id"]
    )


class Match(Input):
    """What a request must be; what is left out matches everything."""

    key_labels: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="Labels of the key.", examples=[{"team": "search"}]
    )
    headers: dict[str, str] = Field(
        default_factory=dict, max_length=16, description="Headers with exactly these values.", examples=[{"x-tier": "gold"}]
    )
    modalities: list[Literal["chat", "completion", "embedding", "rerank", "audio", "image"]] = Field(
        default_factory=list, description="Kinds of call.", examples=[["chat"]]
    )
    stream: bool | None = Field(default=None, description="Whether a stream is asked for.", examples=[True])
    min_prompt_tokens: int | None = Field(
        default=None, ge=0, description="Least estimate (four bytes a token).", examples=[8000]
    )
    max_prompt_tokens: int | None = Field(default=None, ge=0, description="Largest estimate.", examples=[32000])


class RouteRuleIn(Input):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")] = Field(
        description="Shown in `x-bedplate-route`.", examples=["long-prompts"]
    )
    match: Match = Field(description="Which requests it takes.", examples=[{"min_prompt_tokens": 8000}])
    targets: list[RouteTargetIn] = Field(
        min_length=1, max_length=16, description="Where they go.", examples=[[{"endpoint": "chat-long"}]]
    )


class RouteTimeouts(Input):
    """Seconds; what is null has the gateway's default."""

    connect: float | None = Field(default=None, gt=0, le=60, description="To connect to a replica.", examples=[2])
    first_token: float | None = Field(
        default=None, gt=0, le=3600, description="To the first token of a stream.", examples=[300]
    )
    idle: float | None = Field(default=None, gt=0, le=3600, description="Between two parts of a stream.", examples=[120])
    total: float | None = Field(default=None, gt=0, le=86400, description="For the whole answer.", examples=[3600])


class RouteCreate(Input):
    name: PublicName
    targets: list[RouteTargetIn] = Field(
        min_length=1, max_length=16, description="The endpoints behind the name.", examples=[[{"endpoint": "chat"}]]
    )
    rules: list[RouteRuleIn] = Field(
        default_factory=list, max_length=32, description="Exceptions, in order; the first that matches decides.", examples=[[]]
    )
    retry_policy: RetryPolicy = Field(
        default_factory=RetryPolicy, description="Attempts before the first byte.", examples=[{"max_attempts": 3}]
    )
    affinity: Affinity = Field(
        default_factory=Affinity, description="What keeps requests at one replica.", examples=[{"kind": "prefix"}]
    )
    timeouts: RouteTimeouts = Field(default_factory=RouteTimeouts, description="Seconds.", examples=[{"first_token": 60}])


class RouteUpdate(Input):
    """Only the fields that are sent change; in force within a second."""

    targets: list[RouteTargetIn] | None = Field(
        default=None, min_length=1, max_length=16, description="The endpoints behind the name.", examples=[[{"endpoint": "b"}]]
    )
    rules: list[RouteRuleIn] | None = Field(default=None, max_length=32, description="Exceptions, in order.", examples=[[]])
    retry_policy: RetryPolicy | None = Field(
        default=None, description="Attempts before the first byte.", examples=[{"max_attempts": 3}]
    )
    affinity: Affinity | None = Field(
        default=None, description="What keeps requests at one replica.", examples=[{"kind": "prefix"}]
    )
    timeouts: RouteTimeouts | None = Field(default=None, description="Seconds.", examples=[{"idle": 30}])


class RouteTargetView(View):
    endpoint_id: str = Field(description="The endpoint.", examples=["ep_01jd2x4k3fe8v9m2q7t5w0y6za"])
    endpoint: str = Field(description="Its name.", examples=["chat"])
    weight: int = Field(description="Share of the requests.", examples=[1])
    fallback: str | None = Field(description="Name of the endpoint for what this one cannot answer.", examples=["chat-small"])


class RouteRuleView(View):
    name: str = Field(description="Its name.", examples=["long-prompts"])
    match: dict[str, object] = Field(description="Which requests it takes.", examples=[{"min_prompt_tokens": 8000}])
    targets: list[RouteTargetView] = Field(description="Where they go.", examples=[[]])


class RetryPolicyView(View):
    max_attempts: int = Field(description="Attempts before the first byte, the first included.", examples=[3])
    backoff: str = Field(description="Wait before the second attempt.", examples=["200ms"])


class RouteView(Resource):
    name: str = Field(description="The model name that applications send.", examples=["smollm2"])
    targets: list[RouteTargetView] = Field(default_factory=list, description="The endpoints behind the name.", examples=[[]])
    rules: list[RouteRuleView] = Field(default_factory=list, description="Exceptions, in order.", examples=[[]])
    retry_policy: RetryPolicyView = Field(
        default=RetryPolicyView(max_attempts=3, backoff="0ms"),
        description="Attempts before the first byte.",
        examples=[{"max_attempts": 3}],
    )
    affinity: Affinity = Field(description="What keeps requests at one replica.", examples=[{"kind": "prefix"}])
    timeouts: dict[str, float] = Field(description="Seconds, where other than the default.", examples=[{"first_token": 60}])
