"""Load balancers by packets: a client, a balancer and backends in network namespaces. No rule's text is looked at."""

from __future__ import annotations

import time

import pytest

from hostagent.drivers.network import balancer_kernel
from hostagent.lib.wait import until
from tests.agent.balancing import NAMES, VIP4, VIP6, broken

pytestmark = pytest.mark.caps("root", "netns", "nft")
BOTH = pytest.mark.parametrize("vip", [VIP4, VIP6])


@BOTH
async def test_tcp_and_udp_reach_all_backends(edge, vip):
    await edge.take()
    assert set(await edge.stage.spread(vip, 60)) == NAMES
    assert {await edge.stage.ask_udp(vip) for _ in range(60)} == NAMES


@BOTH
async def test_a_source_stays_with_its_backend(edge, vip):
    await edge.take(hash_on="source")
    assert len(await edge.stage.spread(vip, 20)) == 1
    if vip == VIP4:
        found = {host: await edge.stage.ask(vip, source=(f"198.51.100.{host}", 0)) for host in range(2, 40)}
        assert set(found.values()) == NAMES
        assert found == {host: await edge.stage.ask(vip, source=(f"198.51.100.{host}", 0)) for host in range(2, 40)}


@pytest.mark.parametrize("algorithm", ["round_robin", "random"])
@BOTH
async def test_weights_are_held(edge, vip, algorithm):
    wanted = edge.wanted(algorithm=algorithm)
    await edge.take(algorithm=algorithm, backends=edge.states(wanted, bk_1={"weight": 5}))
    found = await edge.stage.spread(vip, 251)
    if algorithm == "round_robin":
        assert found["bk_1"] == pytest.approx(251 * 5 / 8, abs=1)
    else:
        assert found["bk_1"] == pytest.approx(251 * 5 / 8, abs=40)
    assert set(found) == NAMES


@BOTH
async def test_nobody_is_refused_at_once(edge, vip):
    wanted = await edge.take()
    await edge.take(backends=edge.states(wanted, **{name: {"state": "draining"} for name in NAMES}))
    started = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        await edge.stage.ask(vip)
    with pytest.raises(ConnectionRefusedError):
        await edge.stage.ask_udp(vip)
    assert time.monotonic() - started < 1
    with pytest.raises(ConnectionRefusedError):
        await edge.stage.ask(vip, port=444)


@BOTH
async def test_a_drained_backend_keeps_its_flows_until_the_deadline(edge, vip):
    wanted = await edge.take(drain_seconds=1)
    flow = await edge.stage.connect(vip)
    await edge.take(drain_seconds=1, backends=edge.states(wanted, **{flow.backend: {"state": "draining"}}))
    assert set(await edge.stage.spread(vip, 30)) == NAMES - {flow.backend}
    assert await flow.echo() == b"ping"
    await broken(flow)
    assert edge.balancers.services[wanted.id].words()[flow.backend] == "draining"


@BOTH
async def test_an_ejected_backend_loses_its_flows_and_returns(edge, vip):
    wanted = await edge.take()
    flow = await edge.stage.connect(vip)
    name = flow.backend
    await edge.take(backends=edge.states(wanted, **{name: {"state": "ejected", "ejected_seconds": 2}}))
    assert name not in await edge.stage.spread(vip, 30)
    await broken(flow, 1.5)

    async def is_back() -> bool:
        return name in await edge.stage.spread(vip, 20)

    assert await until(is_back, seconds=10)


async def test_the_end_of_a_machine_swaps_its_buckets_and_ends_its_flows(edge):
    wanted = await edge.take()
    ports = range(20000, 20060)
    before = {port: await edge.stage.ask(VIP4, source=("198.51.100.2", port)) for port in ports}
    flow = await edge.stage.connect(VIP4)
    await edge.stage.backends[int(flow.backend[-1]) - 1].close()
    edge.balancers.machine([f"nic_{flow.backend}"], is_running=False)

    async def is_swapped() -> bool:
        return edge.balancers.failovers.counts["process"] == 1

    assert await until(is_swapped, seconds=5)
    assert edge.balancers.services[wanted.id].words()[flow.backend] == "down: its machine ended"
    await broken(flow)
    after = {port: await edge.stage.ask(VIP4, source=("198.51.100.2", port)) for port in ports}
    moved = {port for port in ports if before[port] != after[port]}
    assert moved == {port for port in ports if before[port] == flow.backend}


@BOTH
async def test_the_client_is_masked_or_kept(edge, vip):
    sides = {VIP4: ("198.51.100.2", "10.9."), VIP6: ("2001:db8:c::2", "fd00:9:")}[vip]
    await edge.take()
    flow = await edge.stage.connect(vip)
    assert flow.seen_as.startswith(sides[1])
    flow.reset()
    await edge.take(client_address="kept")
    flow = await edge.stage.connect(vip)
    assert flow.seen_as == sides[0]
    flow.reset()
    await edge.take(source_ipv4="192.0.2.77", source_ipv6="2001:db8:5::77")
    flow = await edge.stage.connect(vip)
    assert flow.seen_as == {VIP4: "192.0.2.77", VIP6: "2001:db8:5::77"}[vip]
    flow.reset()


@pytest.mark.parametrize("client_address", ["kept", "masqueraded"])
@BOTH
async def test_a_backend_reaches_itself_through_the_balancer(edge, vip, client_address):
    await edge.take(client_address=client_address, algorithm="round_robin")
    backend = edge.stage.backends[0]
    edge.stage.client, mine = backend.place, edge.stage.client
    try:
        assert set(await edge.stage.spread(vip, 20)) == NAMES
    finally:
        edge.stage.client = mine


async def test_counters_tell_backends_apart(edge):
    wanted = await edge.take()
    flow = await edge.stage.connect(VIP4)
    await flow.echo(b"x" * 10_000)
    flow.reset()
    mark = edge.balancers.services[wanted.id].marks[8080, flow.backend]
    flows, sent, received = (balancer_kernel.counters(name) for name in ("lb_flows", "lb_in", "lb_out"))
    assert flows[mark][0] == 1
    assert 10_000 < sent[mark][1] < 12_000
    assert 10_000 < received[mark][1] < 12_000
    assert sum(packets for packets, _ in flows.values()) == 1
    assert balancer_kernel.counters("lb_accepted")[mark][0] == 1
