"""What the API takes and shows of networks."""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from controlplane.api.schemas import Input, Labels, Name, Resource
from controlplane.resources.network.allocate import parse_ipv4_cidr


def _checked_cidr(text: str) -> str:
    return str(parse_ipv4_cidr(text))


class NetworkCreate(Input):
    """A new private network."""

    name: Name
    ipv4_cidr: Annotated[str, AfterValidator(_checked_cidr)] | None = Field(
        default=None,
        max_length=43,
        description="An IPv4 prefix inside the operator's pool; left out, a free one is taken. The IPv6 /64 is always chosen.",
        examples=["10.192.7.0/24"],
    )
    encryption: Literal["wireguard", "none"] | None = Field(
        default=None,
        description="How packets to its machines travel between hosts: `wireguard`, or `none` = plain over data "
        "interfaces that the operator declared as trusted. Left out: as the deployment is set, by default `wireguard`.",
        examples=["wireguard"],
    )
    firewall: Annotated[str, StringConstraints(min_length=1, max_length=128)] | None = Field(
        default="default",
        description="The firewall that applies to every machine in it. `default` is made when the project has none: SSH and "
        "ICMP from anywhere, everything among its members. null: none, so nothing is let in.",
        examples=["default"],
    )
    labels: Labels = Field(default_factory=dict)


class NetworkUpdate(Input):
    """Only the fields that are sent change."""

    labels: Labels = Field(default_factory=dict)


class NetworkView(Resource):
    """A private network."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    ipv4_cidr: IPv4Network = Field(description="Its IPv4 prefix, unique in the deployment.", examples=["10.192.7.0/24"])
    ipv6_cidr: IPv6Network = Field(description="Its ULA prefix, unique in the deployment.", examples=["fd4e:1b2c:3d4f::/64"])
    encryption: str = Field(description="How packets to its machines travel between hosts.", examples=["wireguard"])
    mtu_bytes: int = Field(
        description="MTU of its machines' interfaces: no packet of theirs is too large between hosts.", examples=[1420]
    )
    labels: Labels
