"""Bodies of the endpoint routes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import AwareDatetime, Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Progress, Resource, View

MAX_REPLICAS = 100
PublicName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
Isolation = Literal["auto", "vm", "container"]


class AutoscaleWindow(Input):
    """Other bounds for a while, from each start on; the larger hold where several are open."""

    cron: str = Field(max_length=120, description="When it starts: minute hour day month weekday.", examples=["0 8 * * 1-5"])
    minutes: int = Field(ge=1, le=44640, description="How long it lasts.", examples=[600])
    timezone: str = Field(default="UTC", max_length=64, description="Of `cron`.", examples=["Europe/Berlin"])
    min_replicas: int = Field(ge=0, le=MAX_REPLICAS, description="Least replicas meanwhile.", examples=[2])
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="Most replicas meanwhile.", examples=[8])

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        try:
            CronSim(self.cron, datetime(2026, 1, 1))  # noqa: DTZ001 - only parsed
            ZoneInfo(self.timezone)
        except (CronSimError, ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise ValueError(f"not a schedule: {error}") from error
        return self


class Autoscale(Input):
    """As many replicas as the load asks for. Load = requests in flight and waiting, weighted by time."""

    min_replicas: int = Field(
        default=1, ge=0, le=MAX_REPLICAS, description="Never fewer; 0 needs `idle_seconds`.", examples=[0]
    )
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS, description="Never more.", examples=[6])
    target_in_flight: float = Field(default=8, gt=0, le=10_000, description="Load of one replica.", examples=[8])
    target_requests_per_second: float | None = Field(
        default=None, gt=0, le=100_000, description="Besides: requests a second of one replica.", examples=[None]
    )
    stable_seconds: int = Field(default=60, ge=5, le=3600, description="Length of the long mean.", examples=[60])
    panic_seconds: int = Field(default=6, ge=1, le=600, description="Length of the short mean.", examples=[6])
    scale_down_delay_seconds: int = Field(
        default=300, ge=0, le=86400, description="One replica less only after it was enough for so long.", examples=[300]
    )
    idle_seconds: int | None = Field(
        default=None, ge=1, le=604_800, description="To zero so long after the last request ended; null: never.", examples=[600]
    )
    windows: list[AutoscaleWindow] = Field(
        default_factory=list, max_length=16, description="Other bounds at times.", examples=[[]]
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        if self.min_replicas == 0 and self.idle_seconds is None:
            raise ValueError("min_replicas 0 needs idle_seconds: when to go to zero")
        if self.panic_seconds > self.stable_seconds:
            raise ValueError("panic_seconds is more than stable_seconds")
        return self


MaxInFlight = Annotated[
    int,
    Field(ge=0, le=100_000, description="Requests that one replica gets at a time; more wait. 0: no limit.", examples=[32]),
]


class EndpointCreate(Input):
    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["Chat for the search page"])
    labels: Labels = Field(default_factory=dict)
    model: str = Field(max_length=63, description="A model of the catalogue.", examples=["smollm2-135m-instruct"])
    replicas: int = Field(default=1, ge=0, le=MAX_REPLICAS, description="How many replicas serve it.", examples=[1])
    isolation: Isolation = Field(
        default="auto",
        description="`vm`, `container` (weaker; the project must allow it), or `auto`: a VM where a host has usable KVM, "
        "else a container. A VM without KVM is emulated, and only when `vm` is asked for by name.",
        examples=["auto"],
    )
    vcpus: int | None = Field(default=None, ge=1, le=512, description="Cores of a replica; null: the model's.", examples=[1])
    memory_bytes: int | None = Field(
        default=None, ge=1 << 26, le=1 << 46, description="Memory of a replica; null: the model's sum.", examples=[1 << 30]
    )
    network: str | None = Field(
        default=None,
        max_length=128,
        description="Name or id of a network of the project; null: the network `endpoints`, made when missing.",
        examples=["web"],
    )
    route: PublicName | None = Field(
        default=None, description="The model name that applications send; null: the model's name.", examples=["smollm2"]
    )
    has_route: bool = Field(default=True, description="Whether a route is made with the endpoint.", examples=[True])
    autoscale: Autoscale | None = Field(
        default=None, description="Null: as many replicas as asked.", examples=[{"max_replicas": 6}]
    )
    max_in_flight: MaxInFlight = 0
    on_no_capacity: Literal["fail", "wait"] = Field(
        default="fail",
        description="`fail`: 507 and nothing is made; `wait`: made, and placed when there is room.",
        examples=["fail"],
    )


class RolloutStrategy(Input):
    """How replicas are exchanged when model or shape change."""

    max_surge: int = Field(default=1, ge=0, le=100, description="So many replicas more than wanted meanwhile.", examples=[1])
    max_unavailable: int = Field(
        default=0, ge=0, le=100, description="So many ready ones fewer; without a surge at least 1.", examples=[0]
    )
    weight: float = Field(
        default=10, ge=0, le=100, description="Percent of the requests that the first new replica gets.", examples=[10]
    )
    watch_seconds: float = Field(default=20, ge=0, le=86400, description="How long it is watched at that.", examples=[20])
    ramp_seconds: float = Field(
        default=20, ge=0, le=86400, description="Then its share rises for so long to that of any replica.", examples=[20]
    )
    is_held: bool = Field(default=False, description="Stay at `weight` until it is promoted.", examples=[False])
    ready_seconds: float = Field(
        default=1800, ge=1, le=86400, description="Go back when a new replica is not ready by then.", examples=[1800]
    )
    max_error_rate: float = Field(
        default=0.05, ge=0, le=1, description="Go back when so much more of the requests fail than before.", examples=[0.05]
    )
    max_ttft_ratio: float = Field(
        default=3, ge=1, le=1000, description="Go back when the p95 of the first token is so much slower.", examples=[3]
    )

    @model_validator(mode="after")
    def check(self) -> Self:
        if not self.max_surge and not self.max_unavailable:
            raise ValueError("max_surge 0 needs max_unavailable: one must go before another comes")
        return self


class EndpointUpdate(Input):
    """Only the fields that are sent change. Another model, `vcpus` or `memory_bytes` is rolled out replica by replica."""

    model: str | None = Field(
        default=None, max_length=63, description="Serve this model instead; the same name: as imported now.", examples=["m-v2"]
    )
    vcpus: int | None = Field(default=None, ge=1, le=512, description="Cores of a replica; null: the model's.", examples=[2])
    memory_bytes: int | None = Field(
        default=None, ge=1 << 26, le=1 << 46, description="Memory of a replica; null: the model's sum.", examples=[1 << 30]
    )
    rollout: RolloutStrategy | None = Field(default=None, description="How; null: carefully.", examples=[{"weight": 5}])

    description: str = Field(default="", max_length=1000, description="For people.", examples=["Chat"])
    labels: Labels = Field(default_factory=dict)
    autoscale: Autoscale | None = Field(default=None, description="Null: the replicas stay.", examples=[{"max_replicas": 6}])
    max_in_flight: MaxInFlight = 0

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.rollout is not None and not {"model", "vcpus", "memory_bytes"} & self.model_fields_set:
            raise ValueError("rollout says how replicas are exchanged: it goes with model, vcpus or memory_bytes")
        return self


class EndpointScale(Input):
    replicas: int = Field(ge=0, le=MAX_REPLICAS, description="How many replicas shall serve it.", examples=[2])


class ReplicaView(View):
    id: str = Field(description="The id.", examples=["rep_01jd2x4k3fe8v9m2q7t5w0y6za"])
    short_id: str = Field(description="What the gateway's `x-served-by` says.", examples=["7t5w0y6z"])
    revision: int = Field(description="The revision it is made of.", examples=[1])
    state: str = Field(description="`starting`, `ready`, `unhealthy` or `deleting`.", examples=["ready"])
    isolation: str | None = Field(description="`vm` or `container`.", examples=["container"])
    driver: str | None = Field(description="What runs its machine there.", examples=["qemu"])
    accelerator: str | None = Field(description="`kvm`; `tcg`: emulated, slow; null: none is needed.", examples=["kvm"])
    vm_id: str | None = Field(description="Its machine.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    host: str | None = Field(description="Where it runs.", examples=["rack1-4"])
    step: str = Field(description="What is being done.", examples=["serve"])
    reason: str = Field(description="Why it is not ready.", examples=[""])
    ready_at: AwareDatetime | None = Field(description="When it became ready.", examples=["2026-11-30T12:00:00Z"])
    created_at: AwareDatetime = Field(description="When it was made.", examples=["2026-11-30T12:00:00Z"])


class DecisionView(View):
    at: AwareDatetime = Field(description="When.", examples=["2026-11-30T12:00:00Z"])
    reason: str = Field(description="The decision in words.", examples=["4 → 6: panic mean 41.0 over target 8"])
    replicas_before: int = Field(description="Replicas before.", examples=[4])
    replicas_wanted: int = Field(description="What the load asks for.", examples=[6])
    replicas_after: int = Field(description="What there was room for.", examples=[6])
    inputs: dict[str, float | None] = Field(description="What was seen.", examples=[{"load": 41.0}])


class DecisionList(View):
    items: list[DecisionView] = Field(description="The latest first.", examples=[[]])


class RolloutView(View):
    from_revision: int = Field(description="What is replaced.", examples=[1])
    is_back: bool = Field(description="Whether it goes back, because the other revision failed.", examples=[False])
    share: float | None = Field(description="Percent of the requests for new replicas; null: by number.", examples=[10])
    strategy: RolloutStrategy = Field(description="How.", examples=[{"weight": 5}])


class RevisionView(View):
    number: int = Field(description="Counts from 1.", examples=[2])
    model: str = Field(description="The model of the catalogue.", examples=["smollm2-135m-instruct"])
    vcpus: int = Field(description="Cores of a replica.", examples=[1])
    memory_bytes: int = Field(description="Memory of a replica.", examples=[603979776])
    failure: str = Field(description="Why it was taken back; empty: it was not.", examples=[""])
    created_at: AwareDatetime = Field(description="When it was asked for.", examples=["2026-11-30T12:00:00Z"])


class RevisionList(View):
    items: list[RevisionView] = Field(description="The latest first.", examples=[[]])


class EndpointWanted(View):
    replicas: int = Field(description="How many replicas.", examples=[1])
    vcpus: int = Field(description="Cores of a replica.", examples=[1])
    memory_bytes: int = Field(description="Memory of a replica.", examples=[603979776])
    isolation: str = Field(description="What was asked for.", examples=["auto"])
    autoscale: dict[str, object] | None = Field(description="Bounds and targets.", examples=[{"max_replicas": 6}])
    max_in_flight: int = Field(description="Requests that one replica gets at a time.", examples=[32])


class EndpointObserved(View):
    ready_replicas: int = Field(description="How many answer for the model.", examples=[1])
    isolation: str = Field(description="What replicas are.", examples=["container"])
    isolation_reason: str = Field(description="Why they are that.", examples=["no host has usable KVM"])
    generation: int = Field(description="The last generation that is in force.", examples=[1])


class EndpointView(Resource):
    description: str = Field(description="For people.", examples=["Chat"])
    labels: Labels
    model: str = Field(description="The model of the catalogue.", examples=["smollm2-135m-instruct"])
    revision: int = Field(description="What its replicas shall be made of.", examples=[1])
    rollout: RolloutView | None = Field(description="How it gets there, while it does.", examples=[None])
    network_id: str | None = Field(description="The network of its replicas.", examples=["net_01jd2x4k3fe8v9m2q7t5w0y6za"])
    routes: list[str] = Field(description="The public model names that lead here.", examples=[["smollm2-135m-instruct"]])
    status: str = Field(description="`starting`, `ready`, `degraded`, `idle`, `waiting` or `deleting`.", examples=["ready"])
    wanted: EndpointWanted = Field(description="What was asked for.", examples=[{"replicas": 1}])
    observed: EndpointObserved = Field(description="What was seen.", examples=[{"ready_replicas": 1}])
    replicas: list[ReplicaView] = Field(description="Its replicas.", examples=[[]])
    conditions: list[Condition] = Field(description="What is true of it.", examples=[[]])
    progress: Progress | None = Field(description="What is being done just now.", examples=[None])
