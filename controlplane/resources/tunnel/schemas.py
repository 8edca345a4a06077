"""What the API shows of tunnels."""

from __future__ import annotations

from datetime import datetime
from ipaddress import IPv4Address, IPv6Address

from pydantic import Field

from controlplane.api.schemas import View

_TIME = "2026-11-30T12:00:00Z"


class RotationView(View):
    """Whose turn it is among the keys of all hosts."""

    key_generation: int = Field(description="The generation of keys in use, counted from 1.", examples=[3])
    is_rotating: bool = Field(description="Whether the next generation is being brought in.", examples=[False])
    started_at: datetime | None = Field(description="When the last rotation began.", examples=[_TIME])
    finished_at: datetime | None = Field(description="When the last rotation that ended did so.", examples=[_TIME])


class TunnelHostView(View):
    """One host in the mesh."""

    host_id: str = Field(description="The host.", examples=["host_01jd2x4k3fe8v9m2q7t5w0y6za"])
    host: str = Field(description="Its name.", examples=["rack1-4"])
    ipv4: IPv4Address = Field(description="Its own address in the private pool.", examples=["10.255.240.1"])
    ipv6: IPv6Address = Field(description="Its own address in the private IPv6 pool.", examples=["fd4e:1b2c:3d4f:ffff::1"])
    public_keys: list[str] = Field(
        description="The public halves of its keys: one, or two while keys are rotated. Private ones never leave the host.",
        examples=[["DCZwUENZ2WVsRoY2FUSJUx2cOSnzVW8XPiXhAqpYWEk="]],
    )
    heard: list[str] = Field(description="Hosts whose handshake it saw lately.", examples=[["host_01jd2x4k3fe8v9m2q7t5w0y6zb"]])
    is_applied: bool = Field(description="Whether it has taken the newest document.", examples=[True])


class TunnelsView(View):
    """All tunnels between hosts."""

    rotation: RotationView = Field(description="Whose turn it is among the keys.", examples=[{}])
    hosts: list[TunnelHostView] = Field(description="The hosts in the mesh, by name.", examples=[[]])
