"""How soon an edge sends nobody to a backend on another host any more: told of its end, of its stop, or told nothing.

Times are the best of three: a machine that has other work to do measures itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from hostagent.drivers.network.balancer_notices import Notices
from hostagent.lib.wait import until
from hostagent.protocol.network import NoticePeerWanted, NoticesWanted
from hostagent.protocol.wanted import Generation
from tests.agent.balancing import VIP4, Edge
from tests.agent.test_notices import KEY, Heard, silenced

pytestmark = pytest.mark.caps("root", "netns", "nft")
TRIES = 3
NIC = "nic_bk_1"
PORTS = {"host": 7001, "edge": 7002}


def document(mine: str, other: str, **lists: tuple[str, ...]) -> NoticesWanted:
    peer = NoticePeerWanted(host_id=other, address="127.0.0.1", port=PORTS[other], key=KEY.hex(), **lists)
    return NoticesWanted(
        id="notices",
        generation=Generation(epoch=1, number=1),
        host_id=mine,
        listen_address="127.0.0.1",
        listen_port=PORTS[mine],
        peers=(peer,),
    )


class Hosts:
    """The edge with its balancer, and the host of its first backend."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.here, self.there = Notices(edge.balancers), Notices(Heard())  # type: ignore[arg-type]
        self.here.is_ready = self.there.is_ready = True

    async def start(self) -> None:
        self.wanted = await self.edge.take()
        await self.here.take(document("edge", "host", accepts=(NIC,)))
        await self.join()

    async def join(self) -> None:
        await self.there.take(document("host", "edge", sends=(NIC,)))

        async def is_heard() -> bool:
            return self.here.heard() == {"host": True} and self.word == "up"

        assert await until(is_heard, seconds=10)

    @property
    def word(self) -> str:
        return self.edge.balancers.services[self.wanted.id].words()["bk_1"]

    async def seconds_until(self, word: str) -> float:
        """From now to a table that has it not."""
        began = time.monotonic()
        async with asyncio.timeout(10):
            while self.word != word:
                await asyncio.sleep(0.001)
        assert "bk_1" not in self.edge.balancers.services[self.wanted.id].tables[4]
        return time.monotonic() - began

    async def back(self) -> None:
        self.there.machine([NIC], is_running=True)

        async def is_up() -> bool:
            return self.word == "up"

        assert await until(is_up, seconds=10)


@pytest.fixture
async def hosts(edge: Edge) -> AsyncIterator[Hosts]:
    made = Hosts(edge)
    await made.start()
    yield made
    made.here.close()
    made.there.close()
    await asyncio.sleep(0)


async def test_an_end_is_known_at_the_edge_at_once(hosts: Hosts) -> None:
    found: dict[str, list[float]] = {"ended": [], "leaving": []}
    for _ in range(TRIES):
        hosts.there.leave([NIC])
        found["leaving"].append(await hosts.seconds_until("leaving"))
        await hosts.back()
        hosts.there.machine([NIC], is_running=False)
        found["ended"].append(await hosts.seconds_until("down: its host says that it ended"))
        assert "bk_1" not in await hosts.edge.stage.spread(VIP4, 20)
        await hosts.back()
    assert all(min(seconds) <= 0.1 for seconds in found.values()), found


async def test_silence_is_known_at_the_edge_within_half_a_second(hosts: Hosts) -> None:
    found: list[float] = []
    backend = hosts.edge.stage.backends[0]
    for _ in range(TRIES):
        await backend.close()
        await silenced(hosts.there)
        found.append(await hosts.seconds_until("down: nothing is heard of its host"))
        assert "bk_1" not in await hosts.edge.stage.spread(VIP4, 20)
        backend.listen()
        hosts.there = Notices(Heard())  # type: ignore[arg-type]
        hosts.there.is_ready = True
        await hosts.join()
    assert min(found) <= 0.5, found
