"""What the API takes and shows of firewalls. The one rule: whatever a rule can be wrong in by itself is found here."""

from __future__ import annotations

import ipaddress
import itertools
from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Resource, View, wrong_field

MAX_RULES = 100
MAX_CIDRS = 100

Ref = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Port = Annotated[int, Field(ge=1, le=65535)]


def parse_cidr(text: str) -> IPv4Network | IPv6Network:
    """An IPv4 or IPv6 prefix, or an address; ValueError with a sentence for anything else, host bits included."""
    try:
        network = ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is neither a prefix nor an address") from None
    address = ipaddress.ip_interface(text.strip()).ip
    if address != network.network_address:
        raise ValueError(f"{text!r} has host bits set; the prefix is {network}")
    if isinstance(network, IPv6Network) and "%" in text:
        raise ValueError(f"{text!r} names an interface")
    return network


def _checked_cidr(text: str) -> str:
    return str(parse_cidr(text))


def _without_overlap(cidrs: list[str]) -> list[str]:
    """Sorted; raises ValueError naming two prefixes of which one lies in the other."""
    networks = sorted(
        (parse_cidr(cidr) for cidr in cidrs), key=lambda net: (net.version, int(net.network_address), net.prefixlen)
    )
    for before, after in itertools.pairwise(networks):
        if before.version == after.version and int(after.network_address) <= int(before.broadcast_address):
            raise ValueError(f"{after} overlaps {before}: name each address once")
    return [str(network) for network in networks]


Cidrs = Annotated[
    list[Annotated[str, StringConstraints(max_length=64), AfterValidator(_checked_cidr)]],
    Field(min_length=1, max_length=MAX_CIDRS),
    AfterValidator(_without_overlap),
]


class RuleInput(Input):
    """A rule without its action."""

    direction: Literal["ingress", "egress"] = Field(
        default="ingress", description="`ingress` = to the machines, `egress` = from them.", examples=["ingress"]
    )
    protocol: Literal["tcp", "udp", "icmp", "any"] = Field(
        description="`icmp` is ICMP and ICMPv6, `any` every protocol.", examples=["tcp"]
    )
    port_first: Port | None = Field(
        default=None, description="First port of tcp or udp; left out: every port.", examples=[8000]
    )
    port_last: Port | None = Field(default=None, description="Last port; left out: only `port_first`.", examples=[8100])
    cidrs: Cidrs | None = Field(
        default=None,
        description="The far end as prefixes, IPv4 and IPv6, without host bits and overlaps.",
        examples=[["203.0.113.0/24", "2001:db8::/32"]],
    )
    network: Ref | None = Field(default=None, description="The far end is this network of the project.", examples=["front"])
    firewall: Ref | None = Field(
        default=None,
        description="The far end is whatever this firewall is attached to; its own name: its members.",
        examples=["web"],
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        ends = [name for name in ("cidrs", "network", "firewall") if getattr(self, name) is not None]
        if len(ends) != 1:
            raise wrong_field(
                "cidrs", f"name exactly one far end: cidrs, network or firewall (got {', '.join(ends) or 'none'})"
            )
        if self.port_first is None and self.port_last is not None:
            raise wrong_field("port_first", "a last port needs a first one")
        if self.port_first is not None and self.protocol not in {"tcp", "udp"}:
            raise wrong_field("port_first", f"{self.protocol} has no ports")
        if self.port_first is not None and self.port_last is not None and self.port_last < self.port_first:
            raise wrong_field("port_last", f"the range is reversed: {self.port_first} comes after {self.port_last}")
        return self

    @property
    def ports(self) -> tuple[int, int]:
        first = self.port_first or 0
        return first, self.port_last or first


class Rule(RuleInput):
    """A rule."""

    action: Literal["allow", "deny"] = Field(
        default="allow", description="A denial wins over every allowance.", examples=["allow"]
    )


class Target(Input):
    """What a firewall is attached to: a network, or one VM."""

    network: Ref | None = Field(default=None, description="Every machine in this network.", examples=["default"])
    vm: Ref | None = Field(default=None, description="This VM.", examples=["web-1"])

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.network is None) == (self.vm is None):
            raise wrong_field("network", "name a network or a vm, one of them")
        return self


class FirewallCreate(Input):
    """A new firewall."""

    name: Name
    description: str = Field(default="", max_length=1000, description="For people.", examples=["Web servers"])
    labels: Labels = Field(default_factory=dict)
    rules: list[Rule] = Field(
        default_factory=list,
        max_length=MAX_RULES,
        description="Its rules. Without ingress rules nothing is let in; without egress rules everything is let out.",
        examples=[[{"protocol": "tcp", "port_first": 22, "cidrs": ["0.0.0.0/0", "::/0"]}]],
    )
    networks: list[Ref] = Field(
        default_factory=list, max_length=100, description="Networks to attach it to.", examples=[["default"]]
    )
    vms: list[Ref] = Field(default_factory=list, max_length=100, description="VMs to attach it to.", examples=[["web-1"]])


class FirewallUpdate(Input):
    """Only the fields that are sent change; `rules` replaces all rules."""

    description: str = Field(default="", max_length=1000, description="For people.", examples=["Web servers"])
    labels: Labels = Field(default_factory=dict)
    rules: list[Rule] = Field(
        default_factory=list, max_length=MAX_RULES, description="All its rules from now on.", examples=[[]]
    )


class Revoke(Input):
    """Which rule goes."""

    rule: Ref = Field(description="The rule's id.", examples=["fwr_01jd2x4k3fe8v9m2q7t5w0y6za"])


class RuleView(View):
    """A rule."""

    id: str = Field(description="The rule's id.", examples=["fwr_01jd2x4k3fe8v9m2q7t5w0y6za"])
    direction: str = Field(description="`ingress` or `egress`.", examples=["ingress"])
    action: str = Field(description="`allow` or `deny`.", examples=["allow"])
    protocol: str = Field(description="`tcp`, `udp`, `icmp` or `any`.", examples=["tcp"])
    port_first: int | None = Field(description="First port; null: every port.", examples=[8000])
    port_last: int | None = Field(description="Last port; null: every port.", examples=[8100])
    far_end: str = Field(
        description="What the far end is: `cidrs`, `network`, `firewall`, or the operator's `gateways` or `edges`.",
        examples=["cidrs"],
    )
    cidrs: list[str] = Field(description="The prefixes, when `far_end` is `cidrs`.", examples=[["203.0.113.0/24"]])
    network_id: str | None = Field(description="The network, when `far_end` says so.", examples=[None])
    firewall_id: str | None = Field(description="The firewall, when `far_end` says so.", examples=[None])


class AttachmentView(View):
    """What the firewall applies to."""

    kind: str = Field(description="`network` or `vm`.", examples=["network"])
    id: str = Field(description="Its id.", examples=["net_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="Its name.", examples=["default"])


class FirewallView(Resource):
    """A firewall."""

    project_id: str = Field(description="The project it belongs to.", examples=["proj_01jd2x4k3fe8v9m2q7t5w0y6za"])
    description: str = Field(description="For people.", examples=["Web servers"])
    labels: Labels
    rules: list[RuleView] = Field(description="Its rules, oldest first.", examples=[[]])
    attached_to: list[AttachmentView] = Field(description="What it applies to.", examples=[[]])
    hosts: int = Field(description="On how many hosts it has members.", examples=[2])
    observed_generation: int = Field(description="The generation that all reachable hosts have carried out.", examples=[1])
    conditions: list[Condition] = Field(description="What holds and what does not, with reasons.", examples=[[]])
