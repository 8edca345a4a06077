"""Bodies of the host routes."""

from __future__ import annotations

from datetime import datetime
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, StringConstraints, model_validator

from controlplane.api.schemas import Condition, Input, Labels, Name, Resource, View, wrong_field

FINGERPRINT_EXAMPLE = "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"

MAX_PORT = 65535
_LONGEST_PASSWORD = 80
_LONGEST_LABEL = 63  # RFC 1035, 2.3.4


def _is_resolvable(address: str) -> str:
    """An IP address, or a name that DNS can be asked for; ValueError otherwise."""
    try:
        ip_address(address)
    except ValueError:
        if ":" in address or not all(1 <= len(label) <= _LONGEST_LABEL for label in address.split(".")):
            raise ValueError("is neither an IP address nor a host name") from None
    return address


def _has_port(jump: str) -> str:
    """Of `user@host:port` the port is one; ValueError otherwise."""
    _, _, port = jump.rpartition("@")[2].rpartition(":") if jump.count(":") == 1 else ("", "", "")
    if port and not (port.isdigit() and 1 <= int(port) <= MAX_PORT):
        raise ValueError(f"{port} is no port")
    return jump


Address = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:%_-]{0,253}[A-Za-z0-9])?$", max_length=255),
    AfterValidator(_is_resolvable),
    Field(description="Host name or IP address under which SSH is reached.", examples=["rack1-4.example.net"]),
]
Port = Annotated[int, Field(ge=1, le=MAX_PORT, description="Port of SSH.", examples=[22])]
LoginUser = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$"),
    Field(description="User of the first login; with `sudo` it need not be root.", examples=["root"]),
]
Jump = Annotated[
    str,
    StringConstraints(pattern=r"^([a-z_][a-z0-9_-]{0,31}@[A-Za-z0-9.:\[\]_-]{1,255})?$"),
    AfterValidator(_has_port),
    Field(
        description="`user@host[:port]` to go through for the first login; empty: none.", examples=["ops@bastion.example.net"]
    ),
]
Fingerprint = Annotated[
    str,
    StringConstraints(pattern=r"^SHA256:[A-Za-z0-9+/]{43}$"),
    Field(description="The host key's fingerprint as `ssh-keygen -l` prints it.", examples=[FINGERPRINT_EXAMPLE]),
]
AsNumber = Annotated[int, Field(ge=1, le=4_294_967_294)]
Interface = Annotated[
    str,
    StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,15})?$"),
    Field(description="The trusted network between hosts; empty: none.", examples=["eth1"]),
]


class Login(Input):
    """How to log in the first time. Without `identity` the deployment's bootstrap key is used."""

    address: Address
    port: Port = 22
    user: LoginUser = "root"
    sudo: bool = Field(default=False, description="Whether the user becomes root by `sudo -n`.", examples=[False])
    jump: Jump = ""
    identity: SecretStr | None = Field(
        default=None,
        max_length=20_000,
        description="A private key for this operation only; it is sealed, and dropped when the host is ready.",
        examples=[None],
    )


class Share(Login):
    """What of the host may be given away, written to its `/etc/bedplate/host.toml` unless it has one."""

    data_interface: Interface = ""
    cpus: int | None = Field(default=None, ge=1, le=4096, description="Cores for machines; null: all.", examples=[60])
    memory_bytes: int | None = Field(
        default=None, ge=1 << 28, le=1 << 46, description="Memory for machines; null: nearly all.", examples=[274877906944]
    )

    qemu_on_kvm: bool = Field(
        default=False,
        description="Let QEMU run machines where KVM works and Cloud Hypervisor is missing; else nothing is placed there.",
        examples=[False],
    )


class PreflightCreate(Share):
    host_key_fingerprint: Fingerprint | None = Field(
        default=None, description="Refuse another host key; null: show whatever the host has.", examples=[FINGERPRINT_EXAMPLE]
    )


class HostCreate(Share):
    name: Name
    host_key_fingerprint: Fingerprint
    roles: list[Literal["compute", "edge", "gateway"]] = Field(
        default=["compute"], min_length=1, max_length=3, description="What the host is used for.", examples=[["compute"]]
    )
    labels: Labels = Field(default_factory=dict)
    location: str = Field(default="", max_length=63, description="Rack, room or site, for placement.", examples=["rack1"])


def _checked_password(secret: SecretStr) -> SecretStr:
    """As a router's configuration can hold it: RFC 2385 leaves the form open, routers take so much."""
    text = secret.get_secret_value()
    if not 1 <= len(text) <= _LONGEST_PASSWORD or any(not "!" <= one <= "~" or one in '"\\' for one in text):
        raise ValueError(f"must have 1 to {_LONGEST_PASSWORD} printable characters, no blanks, quotes or backslashes")
    return secret


Password = Annotated[SecretStr, AfterValidator(_checked_password)]


class BgpPeer(Input):
    """A router that is told of addresses."""

    address: Annotated[str, StringConstraints(max_length=64), AfterValidator(lambda text: str(ip_address(text)))] = Field(
        description="Its address.", examples=["192.0.2.1"]
    )
    peer_as: AsNumber = Field(description="Its AS number.", examples=[65001])
    password: Password | None = Field(
        default=None,
        description="Of TCP MD5 signatures (RFC 2385), sealed; left out: none. No blanks, quotes or backslashes.",
        examples=[None],
    )


class Bgp(Input):
    """How the host tells routers of the addresses that it holds, from pools with `announce: bgp`."""

    local_as: AsNumber = Field(description="The host's AS number.", examples=[65010])
    port: Port = Field(default=179, description="The host's own port; another one where another BGP program listens.")
    peers: list[BgpPeer] = Field(
        min_length=1, max_length=16, description="The routers.", examples=[[{"address": "192.0.2.1", "peer_as": 65001}]]
    )

    @model_validator(mode="after")
    def _once(self) -> Self:
        addresses = [peer.address for peer in self.peers]
        for place, address in enumerate(addresses):
            if address in addresses[:place]:
                raise wrong_field("peers", f"entry {place}: {address} is named twice")
        return self


class HostUpdate(Input):
    """Only the fields that are sent change."""

    labels: Labels = Field(default_factory=dict)
    location: str = Field(default="", max_length=63, description="Rack, room or site, for placement.", examples=["rack1"])
    bgp: Bgp | None = Field(
        default=None, description="Its routers, all of them; null: as the host's own `host.toml` says.", examples=[None]
    )


class PreflightView(View):
    id: str = Field(description="The id.", examples=["pre_01jd2x4k3fe8v9m2q7t5w0y6za"])
    generation: int = Field(description="Always 1.", examples=[1])
    address: str = Field(description="The host that was looked at.", examples=["rack1-4.example.net"])
    port: int = Field(description="Port of SSH.", examples=[22])
    fingerprint: str = Field(description="The key the host shows; empty until it was reached.", examples=[FINGERPRINT_EXAMPLE])
    report: dict[str, Any] | None = Field(
        description="Checks and facts; null until the host has been asked.", examples=[{"is_fit": True, "checks": []}]
    )
    changes: list[dict[str, Any]] = Field(
        description="What adding the host would change on it.", examples=[[{"kind": "user", "subject": "bedplate"}]]
    )
    created_at: datetime = Field(description="When it was asked for.", examples=["2026-11-30T12:00:00Z"])
    finished_at: datetime | None = Field(description="When the report was there.", examples=["2026-11-30T12:00:03Z"])


class HostView(Resource):
    state: str = Field(description="`enrolling`, `ready` or `removing`.", examples=["ready"])
    roles: list[str] = Field(description="What the host is used for.", examples=[["compute"]])
    labels: Labels
    location: str = Field(description="Rack, room or site.", examples=["rack1"])
    is_cordoned: bool = Field(description="Drained: no new machines come here.", examples=[False])
    address: str = Field(description="Where SSH is reached.", examples=["rack1-4.example.net"])
    port: int = Field(description="Port of SSH.", examples=[22])
    host_key_fingerprint: str = Field(description="The pinned host key.", examples=[FINGERPRINT_EXAMPLE])
    link: str = Field(description="`up`, `lost` or `unknown`.", examples=["up"])
    wanted: dict[str, Any] = Field(description="What was asked for.", examples=[{"roles": ["compute"]}])
    observed: dict[str, Any] = Field(description="What is known of the host now.", examples=[{"link": "up"}])
    changes: list[dict[str, Any]] = Field(
        description="What enrolment has changed on the host.", examples=[[{"kind": "user", "subject": "bedplate"}]]
    )
    conditions: list[Condition] = Field(description="What is true of it, with reasons.", examples=[[]])


class InventoryView(View):
    facts: dict[str, Any] | None = Field(
        description="All that the agent has found on the host; null until it answered once.", examples=[{"hostname": "rack1-4"}]
    )
    facts_at: datetime | None = Field(description="When.", examples=["2026-11-30T12:00:00Z"])


class BootstrapKeyView(View):
    public_key: str = Field(
        description="Put this into `authorized_keys` of the user who enrols a host.",
        examples=["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMq bedplate-bootstrap"],
    )


class ArtifactView(View):
    name: str = Field(description="What it is.", examples=["cloud-hypervisor"])
    version: str = Field(description="The version that this release wants.", examples=["53.0"])
    architecture: str = Field(description="What it is built for.", examples=["x86_64"])
    file: str = Field(description="Its name in an artifact directory.", examples=["cloud-hypervisor"])
    licence: str = Field(description="SPDX expression.", examples=["Apache-2.0"])
    driver: str = Field(description="The driver that needs it.", examples=["machine/cloud_hypervisor"])
    expected_sha256: str = Field(description="Known beforehand; empty: confirmed by who gives it.", examples=[""])
    sha256: str | None = Field(description="Of the file that the control plane holds; null: none.", examples=[None])
    size_bytes: int | None = Field(description="Its size.", examples=[None])


class ArtifactListing(View):
    items: list[ArtifactView] = Field(description="All that the control plane ships to hosts.", examples=[[]])
