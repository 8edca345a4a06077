"""Long flows between trusted links pass by all rules: nothing else changes for them, their figures least of all."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hostagent.drivers.network import balancer_kernel
from hostagent.drivers.network.balancer_rules import OFFLOADED_FROM_BYTES
from hostagent.drivers.network.uplinks import find_uplinks, is_offloadable
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.wait import until
from tests.agent.balancing import NAMES, VIP4, VIP6, Edge, Flow, broken

pytestmark = pytest.mark.caps("root", "netns", "nft")
KERNEL = pytest.mark.caps("flowtable")
BOTH = pytest.mark.parametrize("vip", [VIP4, VIP6])
UPLINKS = ("b1", "b2", "b3", "b4", "c0")
PIECE = b"x" * (128 << 10)


@pytest.fixture
async def offloading(edge: Edge) -> Edge:
    edge.balancers.uplinks = UPLINKS
    return edge


async def carry(flow: Flow, size: int) -> None:
    """There and back."""
    for _ in range(size // len(PIECE)):
        assert await flow.echo(PIECE) == PIECE


async def offloaded(edge: Edge) -> int:
    return sum(flow.is_offloaded for flow in await edge.flows.flows())


def passed(name: str) -> int:
    return sum(size for _, size in balancer_kernel.counters(name).values())


@KERNEL
@BOTH
async def test_a_long_flow_passes_by_all_rules_and_is_counted_all_the_same(offloading: Edge, vip: str) -> None:
    edge = offloading
    await edge.take()
    short = await edge.stage.connect(vip)
    await short.echo()
    assert await offloaded(edge) == 0, "a short one has no use for it"
    flow = await edge.stage.connect(vip)
    size = 8 << 20
    await carry(flow, size)
    assert await offloaded(edge) == 1
    by_rules = passed("lb_in") + passed("lb_out")
    assert by_rules < 4 * OFFLOADED_FROM_BYTES, "the rules have seen its beginning"
    flow.reset()

    async def is_counted() -> bool:
        found = await edge.metric("bedplate_lb_backend_bytes_total")
        sums = [sum(value for name, value in found.items() if f'direction="{way}"' in name) for way in ("in", "out")]
        return all(size < found < size * 1.1 for found in sums)

    assert await until(is_counted, seconds=10), await edge.metric("bedplate_lb_backend_bytes_total")
    live = await edge.metric("bedplate_lb_backend_live_flows")
    assert sum(live.values()) >= 1, "and is a flow of its backend like any other"
    await short.echo()
    short.reset()


@KERNEL
@BOTH
async def test_datagrams_too(offloading: Edge, vip: str) -> None:
    edge = offloading
    await edge.take()
    channel = edge.stage.client.socket(vip, socket.SOCK_DGRAM)
    channel.connect((vip, 443))
    loop = asyncio.get_running_loop()
    backends = set()
    for _ in range(600):
        await loop.sock_sendall(channel, b"x" * 1000)
        async with asyncio.timeout(5):
            backends.add((await loop.sock_recv(channel, 2048)).split()[0])
    channel.close()
    assert len(backends) == 1
    assert await offloaded(edge) == 1
    packets = await edge.metric("bedplate_lb_backend_packets_total")
    assert 1150 < sum(packets.values()) <= 1250


@KERNEL
async def test_a_backends_end_ends_its_offloaded_flows(offloading: Edge) -> None:
    edge = offloading
    await edge.take()
    flow = await edge.stage.connect(VIP4)
    await carry(flow, 2 << 20)
    assert await offloaded(edge) == 1
    edge.balancers.machine([f"nic_{flow.backend}"], is_running=False)

    async def is_forgotten() -> bool:
        return await edge.flows.flows() == []

    assert await until(is_forgotten, seconds=10)
    await broken(flow)
    assert set(await edge.stage.spread(VIP4, 20)) == NAMES - {flow.backend}
    other = await edge.stage.connect(VIP4)
    await carry(other, 2 << 20)
    assert await offloaded(edge) == 1, "the flowtable is there again"
    other.reset()


@KERNEL
async def test_a_flow_that_is_reset_by_its_backend_counts_as_an_error(offloading: Edge) -> None:
    edge = offloading
    await edge.take()
    flow = await edge.stage.connect(VIP4)
    await carry(flow, 2 << 20)
    backend = edge.stage.backends[int(flow.backend[-1]) - 1]
    await backend.close()
    await broken(flow)
    errors = await edge.metric("bedplate_lb_backend_errors_total")
    assert sum(value for name, value in errors.items() if 'kind="reset"' in name and flow.backend in name) >= 1


@KERNEL
@pytest.mark.parametrize(
    ("uplinks", "changes"),
    [
        (UPLINKS, {"established_timeout_seconds": 30}),  # the flowtable would keep it alive by a clock of its own
        (("c0",), {}),  # the way to the backend is no trusted link
    ],
)
async def test_what_must_meet_the_rules_does(edge: Edge, uplinks: tuple[str, ...], changes: dict[str, int]) -> None:
    edge.balancers.uplinks = uplinks
    await edge.take(**changes)
    flow = await edge.stage.connect(VIP4)
    await carry(flow, 2 << 20)
    assert await offloaded(edge) == 0
    assert passed("lb_in") > 2 << 20
    flow.reset()


async def test_without_its_links_the_table_is_written_all_the_same(edge: Edge) -> None:
    edge.balancers.uplinks = ("c0", "gone0")
    await edge.take()
    assert set(await edge.stage.spread(VIP4, 40)) == NAMES


async def test_only_what_is_declared_and_there_is_asked_of_the_kernel(edge: Edge) -> None:
    assert await find_uplinks(HostConfig()) == ()
    assert await find_uplinks(HostConfig(data_interface="gone0", public_interface="c0")) == ()
    assert await find_uplinks(HostConfig(data_interface="bw0", public_interface="c0")) == ()
    found = await find_uplinks(HostConfig(data_interface="b1", public_interface="c0"))
    assert found == (("b1", "c0") if await is_offloadable(("b1", "c0")) else ())
    assert not await is_offloadable(("gone0",))
