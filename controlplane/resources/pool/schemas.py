"""What the API takes and shows of pools."""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from controlplane.api.schemas import Input, Labels, Name, Resource, wrong_field


def parse_prefix(text: str) -> IPv4Network | IPv6Network:
    """A prefix without host bits; ValueError with a sentence otherwise."""
    try:
        return ipaddress.ip_network(text.strip(), strict=True)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a prefix: {error}") from None


def _checked(text: str) -> str:
    network = parse_prefix(text)
    if network.is_multicast or network.is_loopback or network.is_link_local or network.is_unspecified:
        raise ValueError(f"{network} can be no pool of addresses")
    if network.version == 4 and network.prefixlen < 12:
        raise ValueError("an IPv4 pool has a prefix length of 12 to 32")
    if network.version == 6 and network.prefixlen < 32:
        raise ValueError("an IPv6 pool has a prefix length of 32 to 128")
    return str(network)


Cidr = Annotated[str, StringConstraints(max_length=64), AfterValidator(_checked)]
Excluded = Annotated[
    list[Annotated[str, StringConstraints(max_length=64), AfterValidator(lambda text: str(parse_prefix(text)))]],
    Field(
        max_length=256,
        description="Addresses and prefixes inside that are never given away: routers, hosts.",
        examples=[["203.0.113.0/29"]],
    ),
]


class PoolCreate(Input):
    """A new pool."""

    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["Uplink of rack 1"])
    labels: Labels = Field(default_factory=dict)
    cidr: Cidr = Field(description="The prefix, IPv4 or IPv6, without host bits.", examples=["203.0.113.0/24"])
    excluded: Excluded = Field(default_factory=list)
    announce: Literal["none", "arp", "bgp"] = Field(
        default="arp",
        description="How the outside learns who holds an address: `arp` (and neighbour advertisements), `bgp`, or `none`.",
        examples=["arp"],
    )

    @model_validator(mode="after")
    def _inside(self) -> Self:
        pool = ipaddress.ip_network(self.cidr)
        for place, text in enumerate(self.excluded):
            if not is_inside(ipaddress.ip_network(text), pool):
                raise wrong_field("excluded", f"entry {place}: {text} is not inside {pool}")
        return self


def is_inside(part: IPv4Network | IPv6Network, whole: IPv4Network | IPv6Network) -> bool:
    if isinstance(part, IPv4Network):
        return isinstance(whole, IPv4Network) and part.subnet_of(whole)
    return isinstance(whole, IPv6Network) and part.subnet_of(whole)


class PoolUpdate(Input):
    """Only the fields that are sent change; addresses that are reserved already stay so."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["Uplink of rack 1"])
    labels: Labels = Field(default_factory=dict)
    excluded: Excluded = Field(default_factory=list)


class PoolView(Resource):
    """A pool of public addresses."""

    description: str = Field(description="For people.", examples=["Uplink of rack 1"])
    labels: Labels
    cidr: IPv4Network | IPv6Network = Field(description="The prefix.", examples=["203.0.113.0/24"])
    family: str = Field(description="`ipv4` or `ipv6`.", examples=["ipv4"])
    excluded: Excluded
    announce: str = Field(description="How the outside learns who holds an address.", examples=["arp"])
