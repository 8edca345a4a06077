"""What the API takes and shows of placements."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from controlplane.api.schemas import Input, Labels, View

MIB = 1 << 20


class PlacementQuery(Input):
    """A machine that might be made."""

    vcpus: int = Field(default=1, ge=1, le=512, description="Virtual cores.", examples=[2])
    memory_bytes: int = Field(
        default=1024 * MIB, ge=64 * MIB, le=1 << 46, multiple_of=MIB, description="Memory in whole MiB.", examples=[2147483648]
    )
    isolation: Literal["vm", "container"] = Field(default="vm", description="How it is kept apart.", examples=["vm"])
    architecture: Annotated[str, StringConstraints(max_length=32)] = Field(
        default="x86_64", description="The processor it needs.", examples=["x86_64"]
    )
    location: str = Field(default="", max_length=63, description="Only hosts at this location.", examples=["rack1"])
    host_labels: Labels = Field(default_factory=dict)


class ShortView(View):
    """One thing that runs short, or that hosts are not."""

    filter: str = Field(description="The filter's stable name.", examples=["memory"])
    hosts: int = Field(description="On how many hosts it holds.", examples=[3])
    reason: str = Field(description="In words.", examples=["without 8589934592 bytes of free memory"])
    needed: int | None = Field(description="What is needed of it; null where that is no number.", examples=[8589934592])
    most_free: int | None = Field(description="The most that a suitable host has free.", examples=[4294967296])


class VerdictView(View):
    """One host's answer."""

    host_id: str = Field(description="The host.", examples=["host_01jd2x4k3fe8v9m2q7t5w0y6za"])
    name: str = Field(description="Its name.", examples=["host-a"])
    rejected_by: list[str] = Field(description="The filters that say no; empty where the machine fits.", examples=[["memory"]])
    free_vcpus: int = Field(description="Free cores.", examples=[4])
    free_memory_bytes: int = Field(description="Free memory.", examples=[4294967296])
    score: float = Field(description="How full the host would be; the least full that fits is taken.", examples=[0.5])


class ExplanationView(View):
    """Whether the machine fits now, and why not where it does not."""

    hosts: int = Field(description="Hosts in the fleet.", examples=[12])
    fitting: int = Field(description="Hosts that could take it now.", examples=[0])
    detail: str = Field(description="In a sentence.", examples=["None of 12 hosts can take it: 12 without 8 free cores."])
    short: list[ShortView] = Field(description="What runs short on how many hosts.", examples=[[]])
    verdicts: list[VerdictView] = Field(description="Host by host, at most 1000.", examples=[[]])
