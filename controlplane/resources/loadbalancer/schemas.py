"""What the API takes and shows of load balancers."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Resource, View, wrong_field

MAX_BACKENDS = 251
MAX_LISTENERS = 32
Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Port = Annotated[int, Field(ge=1, le=65535)]
Weight = Annotated[
    int, Field(ge=1, le=256, description="Its share of new flows, among the weights of all; 1 to 256.", examples=[1])
]
ProfileName = Literal["default", "grpc", "web", "stream", "dns"]
Text = Annotated[str, StringConstraints(max_length=255)]


class Listener(Input):
    """A port that is served."""

    protocol: Literal["tcp", "udp"] = Field(default="tcp", description="`tcp` or `udp`.", examples=["tcp"])
    port: Port = Field(description="The port at the load balancer's addresses.", examples=[443])
    target_port: Port | None = Field(default=None, description="The port of the backends; left out: the same.", examples=[8443])


class BackendInput(Input):
    """A backend: one of three."""

    vm: Ref | None = Field(default=None, description="A VM: its first interface.", examples=["web-1"])
    endpoint: Ref | None = Field(default=None, description="An endpoint: each of its ready replicas.", examples=["chat"])
    address: Annotated[str, StringConstraints(max_length=64)] | None = Field(
        default=None, description="The private address of an interface in the project.", examples=["10.192.0.7"]
    )
    weight: Weight = 1

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(one is not None for one in (self.vm, self.endpoint, self.address)) != 1:
            raise wrong_field("vm", "name a vm, an endpoint or an address, one of them")
        return self


class BackendUpdate(Input):
    """What may be changed of a backend."""

    weight: Weight


class Probe(Input):
    """How edge hosts find out whether a backend is well; each address family by itself."""

    kind: Literal["tcp", "http", "https", "grpc"] = Field(default="tcp", description="What is tried.", examples=["http"])
    interval_ms: int = Field(default=2000, ge=100, le=300_000, description="From one try to the next.", examples=[2000])
    timeout_ms: int = Field(default=1000, ge=50, le=60_000, description="How long a try may take.", examples=[1000])
    rise: int = Field(default=2, ge=1, le=10, description="Successes in a row that bring it up.", examples=[2])
    fall: int = Field(default=3, ge=1, le=10, description="Failures in a row that take it down.", examples=[3])
    port: int = Field(default=0, ge=0, le=65535, description="Another port than the backend's; 0: its own.", examples=[0])
    path: Annotated[str, StringConstraints(pattern=r"^/[\x21-\x7e]*$", max_length=1024)] = Field(
        default="/", description="HTTP and HTTPS: what is asked for.", examples=["/healthz"]
    )
    host: Text = Field(default="", description="HTTP, HTTPS: the Host header and server name.", examples=["www.example.com"])
    expected_status_first: int = Field(default=200, ge=100, le=599, description="Least status that is well.", examples=[200])
    expected_status_last: int = Field(default=399, ge=100, le=599, description="Last status that is well.", examples=[399])
    expected_body: Text = Field(default="", description="What the body must contain; empty: anything.", examples=["ok"])
    is_tls_verified: bool = Field(default=False, description="HTTPS: whether the certificate must be good.", examples=[False])
    service: Text = Field(default="", description="gRPC: the service that is asked about.", examples=[""])

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.timeout_ms > self.interval_ms:
            raise wrong_field("timeout_ms", f"longer than the interval of {self.interval_ms} ms")
        if self.expected_status_last < self.expected_status_first:
            raise wrong_field("expected_status_last", f"the range is reversed: it begins at {self.expected_status_first}")
        return self


class Circuit(Input):
    """A backend with so many resets or failed handshakes is taken out, and tried again later."""

    errors: int = Field(default=20, ge=1, le=100_000, description="How many errors open the circuit.", examples=[20])
    window_ms: int = Field(default=10_000, ge=1000, le=600_000, description="Within what time.", examples=[10000])
    open_ms: int = Field(
        default=10_000, ge=1000, le=3_600_000, description="After what time it is tried again.", examples=[10000]
    )


class LoadbalancerSettings(Input):
    """What may be changed later."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["The shop"])
    labels: Labels = Field(default_factory=dict)
    algorithm: Literal["hash", "round_robin", "random"] = Field(
        default="hash",
        description="How a new flow finds its backend; every edge host chooses alike by `hash`.",
        examples=["hash"],
    )
    hash_on: Literal["source", "source_port"] = Field(
        default="source_port",
        description="`source` keeps a client at one backend, `source_port` spreads its flows.",
        examples=["source"],
    )
    profile: ProfileName = Field(
        default="default", description="How long idle flows are remembered: see the guide.", examples=["grpc"]
    )
    probe: Probe | None = Field(default_factory=Probe, description="null: none, every backend counts as well.", examples=[{}])
    circuit: Circuit | None = Field(default=None, description="null: none.", examples=[None])
    new_connections_per_second_per_source: int = Field(
        default=0, ge=0, le=1_000_000, description="New flows a second from one client address; 0: any.", examples=[0]
    )
    connections_per_source: int = Field(
        default=0, ge=0, le=1_000_000, description="Open flows from one client address; 0: any.", examples=[0]
    )
    drain_seconds: int = Field(
        default=30, ge=0, le=86_400, description="How long a draining backend keeps its flows.", examples=[30]
    )
    slow_start_seconds: int = Field(
        default=0, ge=0, le=3600, description="How long a backend that came up gets less than its share.", examples=[0]
    )
    edges: int = Field(default=2, ge=1, le=16, description="By how many edge hosts at most it is carried.", examples=[2])


class LoadbalancerCreate(LoadbalancerSettings):
    """A new load balancer."""

    name: Name
    listeners: list[Listener] = Field(
        min_length=1, max_length=MAX_LISTENERS, description="The ports that are served.", examples=[[{"port": 443}]]
    )
    backends: list[BackendInput] = Field(
        default_factory=list, max_length=MAX_BACKENDS, description="The backends.", examples=[[{"vm": "web-1"}]]
    )
    addresses: list[Ref] = Field(
        default_factory=list,
        max_length=16,
        description="Reserved addresses of the project to serve at, not attached elsewhere.",
        examples=[["front"]],
    )
    network: Ref | None = Field(
        default=None, description="Serve at a private address in this network, too.", examples=["default"]
    )


class LoadbalancerUpdate(LoadbalancerSettings):
    """Only the fields that are sent change; `listeners` replaces them all."""

    listeners: list[Listener] = Field(
        default_factory=list,
        min_length=1,
        max_length=MAX_LISTENERS,
        description="All ports from now on.",
        examples=[[{"port": 443}]],
    )


class Eject(Input):
    """For how long a backend is out. An Alertmanager webhook's body will do: `firing` ejects, `resolved` brings back."""

    model_config = ConfigDict(extra="allow")  # Alertmanager adds fields; what we read is checked

    seconds: int | None = Field(default=None, ge=1, le=86_400, description="Time to live; left out: 300.", examples=[300])
    reason: Annotated[str, StringConstraints(max_length=1000)] = Field(
        default="", description="For people.", examples=["It answers too slowly"]
    )
    status: Literal["firing", "resolved"] = Field(
        default="firing", description="Of an Alertmanager webhook.", examples=["firing"]
    )
    alerts: list[dict[str, Any]] = Field(
        default_factory=list, max_length=1000, description="Of an Alertmanager webhook.", examples=[[]]
    )

    @property
    def words(self) -> str:
        """The reason, else the alerts' names."""
        names = {str(labels.get("alertname", "")) for alert in self.alerts if isinstance(labels := alert.get("labels"), dict)}
        return self.reason or ", ".join(sorted(names - {""}))[:1000]


class Alert(Input):
    """One alert of an Alertmanager webhook; its label `backend` says which backend it is about."""

    model_config = ConfigDict(extra="allow")

    status: Literal["firing", "resolved"] = Field(description="Whether it holds.", examples=["firing"])
    labels: dict[str, str] = Field(
        max_length=200,
        description="`backend`: as metrics name it, or its VM's or endpoint's name.",
        examples=[{"backend": "web-1"}],
    )


class Alerts(Input):
    """An Alertmanager webhook's body about any of the backends."""

    model_config = ConfigDict(extra="allow")

    seconds: int | None = Field(default=None, ge=1, le=86_400, description="Time to live; left out: 300.", examples=[300])
    alerts: list[Alert] = Field(
        min_length=1,
        max_length=1000,
        description="A backend is out while one of its alerts fires.",
        examples=[[{"status": "firing", "labels": {"backend": "web-1"}}]],
    )

    def by_backend(self) -> dict[str, Eject]:
        """What to do with each backend that is named: any firing alert ejects it."""
        found: dict[str, Eject] = {}
        for alert in sorted(self.alerts, key=lambda one: one.status == "firing"):
            if backend := alert.labels.get("backend"):
                reason = alert.labels.get("alertname", "")[:1000]
                found[backend] = Eject(status=alert.status, seconds=self.seconds, reason=reason)
        return found


class ListenerView(View):
    """A port that is served."""

    protocol: str = Field(description="`tcp` or `udp`.", examples=["tcp"])
    port: int = Field(description="The port at the load balancer's addresses.", examples=[443])
    target_port: int = Field(description="The port of the backends.", examples=[8443])


class SeenView(View):
    """What one edge host says of a backend."""

    host: str = Field(description="The edge host.", examples=["edge-1"])
    state: str = Field(
        description="`up`, `down`, `leaving` (being stopped), `draining`, `ejected`, `circuit_open`, or in its own words.",
        examples=["up"],
    )
    since: datetime | None = Field(description="Since when it says so.", examples=["2026-11-30T12:00:00Z"])


class TrafficView(View):
    """What a machine carried for the load balancer, at all edge hosts together; counters begin anew with an edge's table."""

    bytes_in: int = Field(description="Bytes to the backend.", examples=[1_048_576])
    bytes_out: int = Field(description="Bytes from the backend.", examples=[52_428_800])
    packets_in: int = Field(description="Packets to the backend.", examples=[1200])
    packets_out: int = Field(description="Packets from the backend.", examples=[38_000])
    flows: int = Field(description="Flows begun.", examples=[420])
    live_flows: int | None = Field(
        description="Flows there now; null where an edge host has too many to count them.", examples=[12]
    )
    refused: int = Field(description="Flows that the backend refused: a reset to the first packet.", examples=[0])
    resets: int = Field(description="Flows that the backend reset later on.", examples=[1])
    bytes_in_per_second: float = Field(description="Between the last two looks.", examples=[3200.5])
    bytes_out_per_second: float = Field(description="Between the last two looks.", examples=[160_000.0])
    flows_per_second: float = Field(description="Flows begun, between the last two looks.", examples=[1.4])
    at: datetime = Field(description="When an edge host was last looked at.", examples=["2026-11-30T12:00:00Z"])


class BackendMachineView(View):
    """One machine of a backend; an endpoint has one for each ready replica."""

    nic_id: str = Field(description="Its interface.", examples=["nic_01jd2x4k3fe8v9m2q7t5w0y6za"])
    ipv4: IPv4Address = Field(description="Its IPv4 address.", examples=["10.192.0.7"])
    ipv6: IPv6Address = Field(description="Its IPv6 address.", examples=["fd4e:1b2c:3d4f::7"])
    state: str = Field(description="The worst that an edge host says; `unknown` until one does.", examples=["up"])
    seen: list[SeenView] = Field(description="What each edge host says.", examples=[[]])
    traffic: TrafficView | None = Field(description="What it carried; null until an edge host has counted.", examples=[None])


class BackendView(View):
    """A backend."""

    id: str = Field(description="The backend's id.", examples=["be_01jd2x4k3fe8v9m2q7t5w0y6za"])
    kind: str = Field(description="`vm` or `endpoint`.", examples=["vm"])
    target: str = Field(description="Name of the VM or endpoint.", examples=["web-1"])
    weight: int = Field(description="Its weight.", examples=[1])
    wanted: str = Field(description="`active`, `draining` or `ejected`.", examples=["active"])
    draining_at: datetime | None = Field(description="Since when it drains.", examples=[None])
    ejected_until: datetime | None = Field(description="Until when it is out.", examples=[None])
    ejected_reason: str = Field(description="Why it is out.", examples=[""])
    machines: list[BackendMachineView] = Field(description="The machines behind it.", examples=[[]])


class EdgeView(View):
    """One edge host of a load balancer."""

    host: str = Field(description="The host.", examples=["edge-1"])
    client_address: str = Field(
        description="`kept`: backends see the client's address; `masqueraded`: the edge host's; `mixed`: some do; `unknown`.",
        examples=["masqueraded"],
    )
    detail: dict[str, str | int | float | bool | None] = Field(description="More from the host.", examples=[{}])


class LoadbalancerView(Resource):
    """A load balancer."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    description: str = Field(description="For people.", examples=["The shop"])
    labels: Labels
    status: str = Field(description="One word: `up`, `degraded`, `down`, `starting` or `deleting`.", examples=["up"])
    vips: list[IPv4Address | IPv6Address] = Field(description="The addresses it serves at.", examples=[["203.0.113.7"]])
    network_id: str | None = Field(description="The network of its private address.", examples=[None])
    listeners: list[ListenerView] = Field(description="The ports that are served.", examples=[[]])
    backends: list[BackendView] = Field(description="The backends, and what edge hosts see of them.", examples=[[]])
    edges: int = Field(description="By how many edge hosts at most it is carried.", examples=[2])
    carried_by: list[EdgeView] = Field(description="The edge hosts that carry it.", examples=[[]])
    algorithm: str = Field(description="How a new flow finds its backend.", examples=["hash"])
    hash_on: str = Field(description="What of the client is hashed.", examples=["source_port"])
    profile: str = Field(description="How long idle flows are remembered.", examples=["default"])
    probe: dict[str, Any] | None = Field(description="How backends are probed.", examples=[{"kind": "tcp"}])
    circuit: dict[str, Any] | None = Field(description="What takes a backend out.", examples=[None])
    new_connections_per_second_per_source: int = Field(description="0: any.", examples=[0])
    connections_per_source: int = Field(description="0: any.", examples=[0])
    drain_seconds: int = Field(description="How long a draining backend keeps its flows.", examples=[30])
    slow_start_seconds: int = Field(description="How long a backend that came up gets less.", examples=[0])
    observed_generation: int = Field(description="The generation that its edge hosts have carried out.", examples=[1])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
