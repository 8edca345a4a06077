"""Flows that were idle for longer than their service's time-out: what the next packet meets, whoever sends it."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from hostagent.lib.wait import until
from tests.agent.balancing import VIP4, VIP6, broken

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
        if flow.channel.fileno() >= 0:
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


async def test_a_client_that_only_waits_hears_its_backend(edge, forgotten):
    """In one test, because forgetting takes its time."""
    await _over_ipv6_a_backend_that_speaks_first_is_not_left_waiting(edge, forgotten)
    await _over_ipv4_its_answer_comes_and_the_flow_goes_on(edge, forgotten)
    await _a_closed_flow_is_not_remembered(edge, forgotten)


async def _over_ipv4_its_answer_comes_and_the_flow_goes_on(edge, forgotten):
    """The answer took longer than the profile: it comes all the same, and the flow goes on in both directions."""
    opened, _ = only(forgotten, 4)
    loop = asyncio.get_running_loop()
    before = await bytes_by_way(edge)
    for backend in edge.stage.backends:
        for channel in backend.flows:
            if channel.family == socket.AF_INET:
                await loop.sock_sendall(channel, b"late")
    for flow in opened:
        async with quickly(), asyncio.timeout(SHORTEST_SECONDS):
            assert await flow.receive() == b"late"
    for flow in opened:
        async with quickly():
            assert await flow.echo() == b"ping", "what the client says then comes to the same backend"
    after = await bytes_by_way(edge)
    assert all(after[name] > before[name] for name in ("in", "out")), "and is counted"


async def _over_ipv6_a_backend_that_speaks_first_is_not_left_waiting(edge, forgotten):
    """Its side ends at once; the client's next packet is answered by a reset."""
    opened, _ = only(forgotten, 6)
    loop = asyncio.get_running_loop()
    for backend in edge.stage.backends:
        for channel in list(backend.flows):
            if channel.family == socket.AF_INET6:
                async with quickly():
                    await loop.sock_sendall(channel, b"late")
                    while channel in backend.flows:
                        await asyncio.sleep(0.001)
    for flow in opened:
        async with quickly():
            with pytest.raises(ConnectionResetError):
                await flow.echo()


def only(forgotten, version):
    opened, services = forgotten
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    return [flow for flow in opened if flow.channel.family == family], services


async def bytes_by_way(edge):
    found = {"in": 0, "out": 0}
    for label, value in (await edge.metric("bedplate_lb_backend_bytes_total")).items():
        found["in" if 'direction="in"' in label else "out"] += value
    return found


async def _a_closed_flow_is_not_remembered(edge, forgotten):
    """And one whose backend goes ends, also when that backend has begun it."""
    opened, services = only(forgotten, 4)

    async def remembered() -> int:
        return (await edge.rules.driver.read("list map inet bedplate lb_late_mark4")).count("expires")

    assert await remembered() == len(opened)
    gone = opened[0].backend
    for wanted in services:
        await edge.balancers.take(replace(wanted, backends=edge.states(wanted, **{gone: {"state": "ejected"}})))
    for flow in opened:
        if flow.backend == gone:
            await broken(flow)
        else:
            assert await flow.echo() == b"ping"
    closed = [flow for flow in opened if flow.backend != gone]
    before = await remembered()
    for flow in closed:
        flow.reset()

    async def is_forgotten() -> bool:
        return await remembered() == before - len(closed)

    assert await until(is_forgotten, seconds=5)
