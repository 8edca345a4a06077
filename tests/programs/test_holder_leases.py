"""Addresses that one host alone may hold: who gets them next, and when."""

from __future__ import annotations

import asyncio
import time

import pytest

from controlplane.models.address import Address
from controlplane.remote.link import HostUnreachable
from controlplane.resources.address.queries import show
from controlplane.watch import holding, queries
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import Grant
from tests.programs.edges import Edges, edges, two_vms

__all__ = ["edges"]


async def test_the_address_goes_to_another_edge_when_its_holder_is_lost_and_its_lease_over(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "LEASED_SECONDS", 1.5)
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        address_id = await edges.reserve()
        lb_id = await edges.balancer(backends=[{"vm": "one"}], addresses=["front"], edges=1)

        async def is_held() -> bool:
            return bool(edges.holding("address", address_id))

        await fleet.until(is_held, "held")
        (holder,) = edges.holding("address", address_id)
        other = "f" if holder == "e" else "e"
        told = edges.hosts[other]
        await edges.until_held("loadbalancer", lb_id, [holder])
        await renewed(edges, holder)
        grants = edges.hosts[holder].host.agent.grants
        assert grants.holds(address_id, edges.hosts[holder].host.agent.monotonic())
        began = time.monotonic()
        await edges.lose(holder)

        async def is_carried() -> bool:
            return told.of("loadbalancer", lb_id) is not None

        await fleet.until(is_carried, "the other edge carries the load balancer at once")
        assert told.of("address", address_id) is None, "the lost one may hold the address still"

        async def is_taken_over() -> bool:
            return told.of("address", address_id) is not None

        await fleet.until(is_taken_over, "taken over by the other edge")
        assert 1.4 < time.monotonic() - began < 6
        fleet.links.mend(edges.hosts[holder].id)
        edges.hosts[holder].host.agent.grants.until.clear()
        await renewed(edges, holder)
        assert not grants.holds(address_id, edges.hosts[holder].host.agent.monotonic()), "it is not granted what it lost"


async def test_another_edge_stands_by_and_takes_turns(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told once the holder has the address, hears the holder's heartbeats, and is granted nothing before its turn."""
    monkeypatch.setattr(holding, "LEASED_SECONDS", 1.5)
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        address_id = await edges.reserve()
        await edges.balancer(backends=[{"vm": "one"}], addresses=["front"])

        async def stands_by() -> bool:
            documents = {name: edges.hosts[name].of("address", address_id) for name in "ef"}
            holders = edges.holding("address", address_id)
            return len(holders) == 1 and all(
                document and document.standby_for == ("" if name in holders else edges.hosts[holders[0]].id)
                for name, document in documents.items()
            )

        await fleet.until(stands_by, "one edge holds, the other stands by")
        (holder,) = edges.holding("address", address_id)
        other = "f" if holder == "e" else "e"

        await fleet.until(lambda: hear_each_other(edges), "both edges told of each other")
        async with fleet.database.session() as session:
            seen = await show(session, await session.get_one(Address, address_id))
        assert (list(seen.held_by), list(seen.standby)) == ([holder], [other])
        assert not await fleet.database.pool.fetchval(queries.HOLDS_ALONE, edges.hosts[other].id)
        assert await fleet.database.pool.fetchval(queries.HOLDS_ALONE, edges.hosts[holder].id)

        await edges.lose(holder)

        async def is_other() -> bool:
            document = edges.hosts[other].of("address", address_id)
            return document is not None and document.standby_for == ""

        await fleet.until(is_other, "the other one confirmed as holder")
        fleet.links.mend(edges.hosts[holder].id)
        await edges.found(holder)
        await fleet.until(stands_by, "the first stands by now")
        assert edges.holding("address", address_id) == [other], "it stays where it is"


async def hear_each_other(edges: Edges) -> bool:
    told = {name: edges.hosts[name].of("notices", "notices") for name in "ef"}
    peers = {name: {peer.host_id for peer in document.peers} for name, document in told.items() if document}
    return len(peers) == 2 and edges.hosts["e"].id in peers["f"] and edges.hosts["f"].id in peers["e"]


async def renewed(edges: Edges, name: str) -> None:
    """One renewal, as the watch does it every two seconds."""
    host_id = edges.hosts[name].id
    calls = edges.fleet.links.calls
    before = len(calls)
    keeping = asyncio.create_task(holding.Holding(host_id, edges.fleet.links, edges.fleet.database).keep())
    has_held = await edges.fleet.database.pool.fetchval(queries.HOLDS_ALONE, host_id)

    async def is_granted() -> bool:
        said = [body for host, verb, body in calls[before:] if (host, verb) == (host_id, "vm.grant")]
        return not has_held or any(isinstance(body, Grant) and body.ids for body in said)

    await edges.fleet.until(is_granted, "granted")
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_silent_holder_is_noticed(edges: Edges, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its grants, not by the connection's keepalive of half a minute."""
    monkeypatch.setattr(holding, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(holding, "SILENT_SECONDS", 0.5)
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        address_id = await edges.reserve()
        await edges.balancer(backends=[{"vm": "one"}], addresses=["front"], edges=1)

        async def is_held() -> bool:
            return bool(edges.holding("address", address_id))

        await fleet.until(is_held, "held")
        host_id = edges.hosts[edges.holding("address", address_id)[0]].id

        async def silence(request: Request) -> Answer:
            await asyncio.sleep(3600)
            raise AssertionError(request)

        fleet.links.add(host_id, silence)
        async with asyncio.timeout(10):
            with pytest.raises(HostUnreachable, match="no answer for"):
                await holding.Holding(host_id, fleet.links, fleet.database).keep()
        leased = "SELECT lease_until > now() FROM holder_lease WHERE host_id = $1"
        assert not await fleet.database.pool.fetchval(leased, host_id), "who only may be there is leased nothing"
