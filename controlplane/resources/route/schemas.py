"""Bodies of the route routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from controlplane.api.schemas import Input, Resource, View

PublicName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$"),
    Field(description="The model name that applications send: letters, digits and . _ : / -", examples=["smollm2"]),
]


class RouteTargetIn(Input):
    endpoint: str = Field(max_length=128, description="Name or id of an endpoint of the project.", examples=["chat"])
    weight: int = Field(default=1, ge=0, le=1000, description="Share of the requests, relative to the others.", examples=[1])


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
    timeouts: RouteTimeouts = Field(default_factory=RouteTimeouts, description="Seconds.", examples=[{"first_token": 60}])


class RouteUpdate(Input):
    """Only the fields that are sent change; in force within a second."""

    targets: list[RouteTargetIn] | None = Field(
        default=None, min_length=1, max_length=16, description="The endpoints behind the name.", examples=[[{"endpoint": "b"}]]
    )
    timeouts: RouteTimeouts | None = Field(default=None, description="Seconds.", examples=[{"idle": 30}])


class RouteTargetView(View):
    endpoint_id: str = Field(description="The endpoint.", examples=["ep_01jd2x4k3fe8v9m2q7t5w0y6za"])
    endpoint: str = Field(description="Its name.", examples=["chat"])
    weight: int = Field(description="Share of the requests.", examples=[1])


class RouteView(Resource):
    name: str = Field(description="The model name that applications send.", examples=["smollm2"])
    targets: list[RouteTargetView] = Field(default_factory=list, description="The endpoints behind the name.", examples=[[]])
    timeouts: dict[str, float] = Field(description="Seconds, where other than the default.", examples=[{"first_token": 60}])
