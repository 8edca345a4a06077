"""A real agent with the kernel's table as an edge: by its verbs, after a flush, after its death, after the control plane's."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import ProbeWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.verbs import Cursor, Subject
from hostagent.protocol.wanted import Generation, Purge
from tests.agent.balancing import NAMES, VIP4, VIP6, Edge, Stage
from tests.agent.conftest import Served

pytestmark = pytest.mark.caps("root", "netns", "nft")


class Host:
    """An agent whose namespace is the stage's balancer."""

    def __init__(self, served: Served, stage: Stage, documents: Edge) -> None:
        self.served, self.stage, self.documents = served, stage, documents

    async def reaches(self, vip: str) -> set[str]:
        try:
            return set(await self.stage.spread(vip, 40))
        except OSError:
            return set()

    async def until_served(self, names: set[str]) -> None:
        async def is_served() -> bool:
            return await self.reaches(VIP4) == names == await self.reaches(VIP6)

        assert await until(is_served, seconds=20)


@pytest.fixture
async def host(own_network: None, tmp_path: Path) -> AsyncIterator[Host]:
    del own_network
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    served = Served(root)
    served.paths.config.mkdir(parents=True)
    served.paths.host_config.write_text('supervisor = "plain"\n')
    stage = Stage()
    documents = Edge(stage, tmp_path)
    try:
        stage.build()
        for backend in stage.backends:
            backend.listen()
        await served.start()
        yield Host(served, stage, documents)
        await served.stop()
    finally:
        await documents.close()
        await stage.close()
        shutil.rmtree(root, ignore_errors=True)


async def test_it_serves_outlives_a_flush_and_the_agents_death(host):
    client = await host.served.client()
    await client.call("events.subscribe", Cursor())
    wanted = host.documents.wanted(probe=ProbeWanted(kind="tcp", interval_ms=200, timeout_ms=200, rise=1, fall=2))
    assert isinstance((await client.call("loadbalancer.ensure", wanted)).result, Succeeded)
    await host.until_served(NAMES)
    observed = (await client.call("loadbalancer.observe", Subject(id=wanted.id))).object
    assert observed.state == "present"
    assert {value for key, value in observed.detail.items() if key.startswith("up:")} == {"up"}
    carried = (await client.call("traffic.observe", Subject(id=wanted.id))).backends
    assert {one.id for one in carried} == NAMES
    assert all(one.flows and one.bytes_in and one.bytes_out and one.packets_in for one in carried)
    assert all(one.live_flows is not None for one in carried)
    assert (await client.call("traffic.observe", Subject(id="lb_nothing"))).backends == ()

    subprocess.run(["nft", "flush", "ruleset"], check=True)
    await host.until_served(NAMES)
    async with asyncio.timeout(10):
        while (await client.events.get()).event != "rules.disturbed":
            pass

    await host.served.kill()
    assert await host.reaches(VIP4) == NAMES, "the kernel needs no agent"
    subprocess.run(["nft", "flush", "ruleset"], check=True)  # as a reboot leaves it
    await host.served.start()
    await host.until_served(NAMES)

    client = await host.served.client()
    assert isinstance(
        (await client.call("loadbalancer.purge", Purge(id=wanted.id, generation=wanted.generation))).result, Succeeded
    )
    with pytest.raises(ConnectionRefusedError):
        await host.stage.ask(VIP4)


async def test_documents_that_cannot_be_true_are_refused(host):
    client = await host.served.client()
    wanted = host.documents.wanted()
    probe = ProbeWanted(kind="https", interval_ms=1, timeout_ms=1)
    other = replace(host.documents.wanted(), id="lb_000000000002", generation=Generation(epoch=1, number=1))
    await client.call("loadbalancer.ensure", wanted)
    for document, code, words in (
        (other, "loadbalancer.vip_taken", "443 already"),
        (replace(other, vips=("nonsense",)), "loadbalancer.invalid", "nonsense"),
        (replace(other, vips=("203.0.113.99",), backends=wanted.backends * 2), "loadbalancer.invalid", "each once"),
        (
            replace(other, vips=("203.0.113.99",), backends=(replace(wanted.backends[0], weight=257),)),
            "loadbalancer.invalid",
            "1 to 256",
        ),
        (replace(other, vips=("203.0.113.99",), probe=probe), "loadbalancer.too_many_probes", "this host sustains"),
    ):
        with pytest.raises(AgentError) as caught:
            await client.call("loadbalancer.ensure", document)
        assert caught.value.code == code
        assert words in caught.value.message
    await host.until_served(NAMES)
