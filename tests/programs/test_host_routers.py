"""Routers of a host, from its row to what it is told: with the passwords, which no document in the database has."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import select

from controlplane.models.host import Host
from controlplane.models.host_document import HostDocument
from controlplane.resources.host import service as hosts
from controlplane.resources.host.schemas import HostUpdate
from tests.programs.edges import Edges, edges

__all__ = ["edges"]


async def test_a_host_is_told_its_routers_and_their_passwords(edges: Edges) -> None:
    fleet = edges.fleet

    async def change(password: str) -> None:
        peer = {"address": "192.0.2.250", "peer_as": 65001, "password": password}
        wanted = HostUpdate.model_validate({"bgp": {"local_as": 65010, "peers": [peer]}})
        async with fleet.database.session() as session:
            row = await session.get_one(Host, edges.hosts["e"].id, with_for_update={"key_share": True})
            await hosts.update(session, fleet.world.sealer, row, wanted)

    async def is_told(password: str) -> bool:
        policy = edges.hosts["e"].of("policy", "policy")
        return bool(policy and policy.bgp and policy.bgp.peers[0].password == password)

    async with fleet.running():
        await change("first-password")
        await fleet.until(lambda: is_told("first-password"), "the routers told")
        policy = edges.hosts["e"].of("policy", "policy")
        assert (policy.bgp.local_as, policy.bgp.port, policy.bgp.peers[0].peer_as) == (65010, 179, 65001)
        await change("second-password")
        await fleet.until(lambda: is_told("second-password"), "the new password told")
        assert edges.hosts["e"].of("policy", "policy").generation > policy.generation
        other = edges.hosts["f"].of("policy", "policy")
        assert other is None or other.bgp is None
        async with fleet.database.session() as session:
            rows = list(await session.scalars(select(HostDocument.document).where(HostDocument.kind == "policy")))
        kept = [cast("Any", row)["bgp"] for row in rows]
        assert [peer["password"] for one in kept if one for peer in one["peers"]] == [""]
