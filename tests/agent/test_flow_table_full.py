"""A kernel that cannot remember one flow more: old ones go on, answered ones stay, and the host says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostagent.facts.flows import flow_table
from tests import namespaces
from tests.agent.balancing import VIP4, Edge

pytestmark = pytest.mark.caps("root", "netns", "nft", "own_machine")
SETTINGS = Path("/proc/sys/net/netfilter")


def put(name: str, value: int) -> int:
    """Of the kernel as a whole, which only the first network namespace may change; the value before."""
    with namespaces.inside("/proc/1/ns/net"):
        before = int((SETTINGS / name).read_text())
        (SETTINGS / name).write_text(str(value))
    return before


@pytest.fixture
def settings() -> Iterator[None]:
    before = {name: put(name, value) for name, value in (("nf_conntrack_max", 4096), ("nf_conntrack_buckets", 512))}
    yield
    for name, value in before.items():
        put(name, value)


async def test_old_flows_go_on_and_new_ones_wait_for_room(edge: Edge, settings: None) -> None:
    await edge.take()
    old = [await edge.stage.connect(VIP4) for _ in range(8)]
    before = flow_table()
    assert not before.is_nearly_full
    limit = put("nf_conntrack_max", await edge.flows.count())
    with pytest.raises(TimeoutError):
        await edge.stage.connect(VIP4)
    full = flow_table()
    assert full.is_nearly_full
    assert full.refused > before.refused, "who is refused is counted, since nobody hears of it otherwise"
    for flow in old:
        assert await flow.echo() == b"ping"

    put("nf_conntrack_max", limit)
    assert await edge.stage.ask(VIP4)
    assert not flow_table().is_nearly_full
    for flow in old:
        flow.reset()


async def test_flows_that_nobody_confirmed_make_room(edge: Edge, settings: None) -> None:
    await edge.take()
    old = [await edge.stage.connect(VIP4) for _ in range(8)]
    for _ in range(25):
        await asyncio.gather(*(edge.stage.ask_udp(VIP4) for _ in range(10)))
    before = flow_table()
    put("nf_conntrack_max", await edge.flows.count())
    for _ in range(5):
        assert await edge.stage.ask(VIP4)
    assert flow_table().evicted >= before.evicted + 5
    for flow in old:
        assert await flow.echo() == b"ping"
        flow.reset()
