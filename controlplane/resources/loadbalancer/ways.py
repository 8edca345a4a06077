"""By which ways clients' addresses are kept between edges and hosts of backends, and which of these are open.

The one rule: a backend is sent clients by a way when both ends have carried out that it is there, and goes on being sent them
while it is planned; until then, and where there is no tunnel, it sees the edge instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.models.host_document import HostDocument
from controlplane.resources.network.mesh import Mesh
from controlplane.resources.network.queries import load_mesh
from controlplane.settings import NetworkSettings
from hostagent.protocol.network import EdgeWaysWanted, WayInWanted, WayOutWanted

WAYS = "edgeways"
OVERHEAD_BYTES = 50  # outer IPv4 (20), UDP (8), VXLAN (8), inner Ethernet (14)
Accept = tuple[str, Literal["tcp", "udp"], int]


@dataclass(slots=True)
class Pair:
    """From one edge to one host."""

    destinations: set[str] = field(default_factory=set)
    accepts: set[Accept] = field(default_factory=set)


async def plan_ways(
    session: AsyncSession, settings: NetworkSettings, balanced: Iterable[tuple[str, Mapping[str, Any]]]
) -> None:
    """`balanced`: the load balancers' documents as they are planned, by edge."""
    mesh = await load_mesh(session, settings)
    pairs = pairs_of(mesh, balanced)
    hosts = sorted({host for pair in pairs for host in pair})
    for host_id in hosts:
        await documents.plan(session, host_id, WAYS, document(mesh, host_id, pairs))
    await documents.withdraw(session, WAYS, WAYS, keep=hosts)


def pairs_of(mesh: Mesh, balanced: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[tuple[str, str], Pair]:
    """By (edge, host): only what the tunnel between them carries."""
    found: dict[tuple[str, str], Pair] = {}
    for edge, wanted in balanced:
        for backend in wanted["backends"]:
            host, member = backend["host_id"], mesh.members.get(backend["host_id"])
            is_between = edge != host and edge in mesh.members and member is not None
            if backend["state"] == "removed" or not is_between or mesh.slot_between(edge, host) is None:
                continue
            if member is None or f"{backend['ipv4']}/32" not in member.encrypted:
                continue
            pair = found.setdefault((edge, host), Pair())
            addresses = [address for address in (backend["ipv4"], backend["ipv6"]) if address]
            pair.destinations.update(addresses)
            for one in wanted["listeners"]:
                pair.accepts.update((address, one["protocol"], one["target_port"]) for address in addresses)
    return found


def document(mesh: Mesh, host_id: str, pairs: Mapping[tuple[str, str], Pair]) -> EdgeWaysWanted:
    outward = [
        WayOutWanted(host_id=host, address=mesh.members[host].own[0], destinations=tuple(sorted(pair.destinations)))
        for (edge, host), pair in sorted(pairs.items())
        if edge == host_id
    ]
    inward = [
        WayInWanted(
            host_id=edge, address=mesh.members[edge].own[0], network=number_of(edge), accepts=tuple(sorted(pair.accepts))
        )
        for (edge, host), pair in sorted(pairs.items())
        if host == host_id
    ]
    return EdgeWaysWanted(
        id=WAYS,
        generation=documents.UNPLANNED,
        host_id=host_id,
        address=mesh.members[host_id].own[0],
        network=number_of(host_id) if outward else 0,
        mtu_bytes=mesh.mtu_bytes - OVERHEAD_BYTES,
        outward=tuple(outward),
        inward=tuple(inward),
    )


def number_of(edge: str) -> int:
    """24 bits of its id. Two edges alike: a host that knows both refuses, and sees no clients, which is shown."""
    return int.from_bytes(hashlib.sha256(edge.encode()).digest()[:3]) or 1


async def open_from(session: AsyncSession, edge: str) -> tuple[frozenset[str], frozenset[str]]:
    """Addresses of backends that this edge reaches by ways: (those that both ends have carried out, those that are planned)."""
    query = select(HostDocument).where(HostDocument.kind == WAYS, HostDocument.is_wanted)
    rows = {row.host_id: row for row in await session.scalars(query.execution_options(populate_existing=True))}
    here = rows.get(edge)
    ready: set[str] = set()
    planned: set[str] = set()
    for way in cast("list[dict[str, Any]]", here.document["outward"]) if here else []:
        there = rows.get(way["host_id"])
        inward = cast("list[dict[str, Any]]", there.document["inward"]) if there else []
        accepted = {one[0] for back in inward if back["host_id"] == edge for one in back["accepts"]}
        both = accepted.intersection(way["destinations"])
        planned |= both
        if here and there and all(row.applied_generation == row.generation for row in (here, there)):
            ready |= both
    return frozenset(ready), frozenset(planned)


async def kept_on(session: AsyncSession, edge: str, kind: str, loadbalancer_id: str) -> frozenset[str]:
    """Addresses of backends whose clients' addresses are kept by a way on this edge from now on."""
    ready, planned = await open_from(session, edge)
    row = await session.get(HostDocument, (edge, kind, loadbalancer_id), populate_existing=True)
    backends = cast("list[dict[str, Any]]", row.document["backends"]) if row is not None and row.is_wanted else []
    before = {str(backend["ipv4"]) for backend in backends if backend.get("reply") == "way"}
    return ready | (planned & before)
