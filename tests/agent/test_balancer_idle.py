"""Flows that were idle for longer than their service's time-out: what the next packet meets, whoever sends it."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from hostagent.lib.wait import until
from tests.agent.balancing import VIP4, VIP6

pytestmark = pytest.mark.caps("root", "netns", "nft")
SHORTEST_SECONDS = 5
QUICK_SECONDS = 0.1
KEPT = {VIP4: "203.0.113.11", VIP6: "2001:db8:f::11"}


@pytest.fixture
async def forgotten(edge):
    """Flows of two services, one of which keeps client addresses, with the shortest profile: conntrack has nothing left."""
    masked = edge.wanted(established_timeout_seconds=SHORTEST_SECONDS)
    kept = replace(masked, id="lb_000000000002", vips=tuple(KEPT.values()), client_address="kept")
    for wanted in (masked, kept):
        await edge.balancers.take(wanted)
    vips = (*masked.vips, *kept.vips)
    opened = [await edge.stage.connect(vip) for vip in vips for _ in range(8)]
    await asyncio.gather(*(flow.echo() for flow in opened))
    begun = time.monotonic()

    async def is_empty():
        return await edge.flows.flows(addresses=vips) == []

    assert await until(is_empty, seconds=SHORTEST_SECONDS + 5)
    assert time.monotonic() - begun >= SHORTEST_SECONDS - 1, "the profile is what forgets"
    yield opened, (masked, kept)
    for flow in opened:
        flow.reset()


@asynccontextmanager
async def quickly():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < QUICK_SECONDS


async def test_the_shortest_profile_forgets_and_goes_on_or_resets(edge, forgotten):
    opened, services = forgotten
    going_on, staying = opened[::2], opened[1::2]
    for flow in going_on:
        async with quickly():
            assert await flow.echo() == b"ping", flow.backend
    gone = staying[0].backend
    for wanted in services:
        await edge.balancers.take(replace(wanted, backends=edge.states(wanted, **{gone: {"state": "draining"}})))
    assert {flow.backend for flow in staying} > {gone}
    for flow in staying:
        async with quickly():
            if flow.backend == gone:
                with pytest.raises(ConnectionResetError):
                    await flow.echo()
            else:
                assert await flow.echo() == b"ping", "another backend's absence is nothing to it"


async def test_a_backend_that_speaks_first_is_not_left_waiting(edge, forgotten):
    """Its side ends at once; the client's next packet is answered by a reset."""
    opened, _ = forgotten
    loop = asyncio.get_running_loop()
    for backend in edge.stage.backends:
        for channel in list(backend.flows):
            async with quickly():
                await loop.sock_sendall(channel, b"late")
                while channel in backend.flows:
                    await asyncio.sleep(0.001)
    for flow in opened:
        async with quickly():
            with pytest.raises(ConnectionResetError):
                await flow.echo()
