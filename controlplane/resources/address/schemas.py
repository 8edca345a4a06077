"""What the API takes and shows of reserved addresses."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Resource, wrong_field

Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]


def parse_address(text: str) -> IPv4Address | IPv6Address:
    """One address; ValueError with a sentence otherwise."""
    try:
        return IPv6Address(text) if ":" in text and "%" not in text else IPv4Address(text)
    except ValueError:
        raise ValueError(f"{text!r} is not an address") from None


class AddressReserve(Input):
    """A new reservation."""

    name: Name
    family: Literal["ipv4", "ipv6"] | None = Field(
        default=None, description="Which kind; left out: that of `address` or `pool`, else `ipv4`.", examples=["ipv4"]
    )
    pool: Ref | None = Field(default=None, description="From this pool; left out: from any of the family.", examples=["uplink"])
    address: Annotated[str, StringConstraints(max_length=64), AfterValidator(lambda text: str(parse_address(text)))] | None = (
        Field(default=None, description="This very address; left out: a free one.", examples=["203.0.113.7"])
    )
    labels: Labels = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_family(self) -> Self:
        if self.address is not None and self.family not in {None, f"ipv{parse_address(self.address).version}"}:
            raise wrong_field("address", f"{self.address} is not {self.family}")
        return self


class AddressUpdate(Input):
    """Only the fields that are sent change."""

    labels: Labels = Field(default_factory=dict)


class AddressAttach(Input):
    """What it shall lead to."""

    vm: Ref | None = Field(default=None, description="A VM: its first interface, in both directions.", examples=["web-1"])
    loadbalancer: Ref | None = Field(default=None, description="A load balancer.", examples=["front"])
    move: bool = Field(default=False, description="Take it away from what it is attached to now.", examples=[True])

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.vm is None) == (self.loadbalancer is None):
            raise wrong_field("vm", "name a vm or a loadbalancer, one of them")
        return self


class AddressView(Resource):
    """A reserved address."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    labels: Labels
    address: IPv4Address | IPv6Address = Field(description="The address.", examples=["203.0.113.7"])
    family: str = Field(description="`ipv4` or `ipv6`.", examples=["ipv4"])
    pool_id: str = Field(description="The pool it comes from.", examples=["pool_01jd2x4k3fe8v9m2q7t5w0y6za"])
    vm_id: str | None = Field(description="The VM it leads to.", examples=["vm_01jd2x4k3fe8v9m2q7t5w0y6za"])
    loadbalancer_id: str | None = Field(description="The load balancer it leads to.", examples=[None])
    target: str | None = Field(description="The name of what it leads to.", examples=["web-1"])
    held_by: list[str] = Field(description="The hosts that hold it now.", examples=[["edge-1"]])
    standby: list[str] = Field(
        description="The edge hosts that take it by themselves when its holder is dead.", examples=[["edge-2"]]
    )
    observed_generation: int = Field(description="The generation that hosts have carried out.", examples=[1])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
