"""Clients' addresses kept between hosts: by packets from a client through an edge, a tunnel and a backend's host, and back."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hostagent.drivers.network.address_rules import WAYS, ways_part
from hostagent.drivers.network.edgeway_rules import PART, edgeways_part
from hostagent.drivers.network.edgeways import FIRST_TABLE, PORT, EdgeWays, mac_of
from hostagent.drivers.network.nft import best
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.lib.wait import until
from hostagent.protocol.network import BackendWanted, EdgeWaysWanted, ListenerWanted, WayInWanted, WayOutWanted
from tests.agent.balancing import VIP4, VIP6, Backend, Edge, Place, Stage, ip, sysctl
from tests.conformance.netns import udp
from tests.conformance.wires import ONE, Side, frames, heard, joined, two_hosts
from tests.namespaces import inside

pytestmark = pytest.mark.caps("root", "netns", "nft", "wireguard")
NETWORK = 0xABCDEF
CLIENT = {VIP4: "198.51.100.2", VIP6: "2001:db8:c::2"}
BOTH = pytest.mark.parametrize("vip", [VIP4, VIP6])
LOUD = b"n" * 300_000


class Guest(Place):
    """The guest of a host, which is there already."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.descriptor = -1
        self._sockets: list[socket.socket] = []

    def inside(self):
        return inside(self.name)


class Hosts:
    """An edge and a host with one backend, in encrypted networks; a client before the edge."""

    def __init__(self, edge: Side, host: Side, directory: Path) -> None:
        self.edge, self.host = edge, host
        self.stage = Stage()
        self.balancer = Edge(self.stage, directory / "balancer")
        self.ways = {side: EdgeWays(side.netns, directory / f"{side.number}.json") for side in (edge, host)}
        with host.inside():
            self.rules = Ruleset(best())
        self.backend = Backend(Guest(host.guest), "bk_1", host.nic.ipv4, host.nic.ipv6)
        self.stage.backends = [self.backend]

    async def build(self) -> None:
        await joined(self.edge, self.host, {"a": 1})
        await self.edge.route(self.host, "a")
        await self.host.route(self.edge, "a")
        with self.edge.inside():
            for key in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
                sysctl(key, "1")
            self.stage._wire(self.stage.client, "c0", 0, "198.51.100", "2001:db8:c")
            for vip in (f"{VIP4}/32", f"{VIP6}/128"):
                ip("address", "add", vip, "dev", "lo")
            await self.balancer.start()
            await self.balancer.flows.count()
            await self.balancer.rules.put({WAYS: ways_part(())})
        with self.host.inside():  # a host knows ways to clients, as every host with a default route does
            ip("route", "add", "default", "via", "192.0.2.1", "dev", "data0")
            ip("-6", "route", "add", "default", "dev", "data0")
            await self.rules.start({WAYS: ways_part(())})
        self.backend.listen()
        self.backend.listen(9090)

        async def is_joined() -> bool:
            return await heard(self.edge, self.host, {"a": 1})

        assert await until(is_joined, seconds=20)

    def document(self, side: Side) -> EdgeWaysWanted:
        addresses = (self.host.nic.ipv4, self.host.nic.ipv6)
        wanted = EdgeWaysWanted(id="edgeways", generation=ONE, host_id=side.id, address=side.address)
        if side is self.edge:
            out = WayOutWanted(host_id=self.host.id, address=self.host.address, destinations=addresses)
            return replace(wanted, network=NETWORK, outward=(out,))
        accepts = tuple((address, protocol, 8080) for address in addresses for protocol in ("tcp", "udp"))
        way = WayInWanted(host_id=self.edge.id, address=self.edge.address, network=NETWORK, accepts=accepts)
        return replace(wanted, inward=(way,))

    async def open(self) -> None:
        """Both ends' documents carried out as an agent does."""
        for side, rules in ((self.host, self.rules), (self.edge, self.balancer.rules)):
            document, ways = self.document(side), self.ways[side]
            with side.inside():
                await rules.put({PART: edgeways_part(document, ways.plan(document))})
                await ways.apply(document)
                assert await ways.differences(document) == ()
                await ways.apply(document)
                assert await ways.differences(document) == ()

    async def take(self, **changes) -> None:
        backend = BackendWanted(
            id="bk_1", ipv4=self.host.nic.ipv4, ipv6=self.host.nic.ipv6, host_id=self.host.id, nic_id=self.host.nic.id
        )
        backend = replace(backend, **{name: changes.pop(name) for name in ("reply",) if name in changes})
        with self.edge.inside():
            await self.balancer.take(**{"client_address": "kept", "backends": (backend,)} | changes)

    async def close(self) -> None:
        await self.balancer.close()
        await self.rules.close()
        await self.stage.close()
        for side, ways in self.ways.items():
            with side.inside():
                await ways.remove()
                assert await ways.differences(replace(self.document(side), inward=(), outward=())) is None
                assert "bx" not in ip("-br", "link")
                assert "lookup 519" not in ip("rule") + ip("-6", "rule")


@pytest.fixture
async def hosts(own_network: None, tmp_path: Path) -> AsyncIterator[Hosts]:
    del own_network
    async with two_hosts(tmp_path) as (one, two):
        made = Hosts(one, two, tmp_path)
        try:
            await made.build()
            await made.open()
            yield made
        finally:
            await made.close()


async def test_the_client_is_seen_by_a_backend_on_another_host(hosts):
    wire = hosts.edge.capture()
    await hosts.take(reply="way")
    for vip, address in CLIENT.items():
        flow = await hosts.stage.connect(vip)
        assert flow.seen_as == address
        assert await flow.echo(LOUD) == LOUD, "more than one packet, and larger ones than the way has room for"
        assert await hosts.stage.ask_udp(vip) == "bk_1"
        flow.reset()
    seen = frames(wire)
    wire.close()
    assert len(seen) > 20
    assert not any(LOUD[:64] in frame for frame in seen), "all of it inside the tunnel"

    await hosts.take(reply="masqueraded")
    flow = await hosts.stage.connect(VIP4)
    assert flow.seen_as == hosts.edge.address, "as long as there is no way"
    flow.reset()


async def test_only_an_edge_sends_by_its_way_and_only_to_what_it_balances(hosts):
    await hosts.take(reply="way")
    assert await hosts.stage.ask_udp(VIP4) == "bk_1"
    before = hosts.backend.accepted
    kind, packet = udp("198.51.100.9", hosts.host.nic.ipv4, 8080)
    macs = (bytes.fromhex(mac_of(side.address).replace(":", "")) for side in (hosts.host, hosts.edge))
    inner = b"".join(macs) + kind.to_bytes(2, "big") + packet

    def send(source: str, destination: str, network: int = NETWORK) -> None:
        with hosts.edge.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
            channel.bind((source, 0))
            channel.sendto(struct.pack("!II", 0x08000000, network << 8) + inner, (destination, PORT))

    async def has_come() -> bool:
        return hosts.backend.accepted > before

    send("192.0.2.1", "192.0.2.2")  # beside the tunnel
    send("192.0.2.1", hosts.host.address)
    send(hosts.edge.address, hosts.host.address, NETWORK + 1)
    assert not await until(has_come, seconds=0.5)
    send(hosts.edge.address, hosts.host.address)
    assert await until(has_come, seconds=5), "the same by the way itself"

    await hosts.take(reply="way", listeners=(ListenerWanted(protocol="tcp", port=443, target_port=9090),))
    channel = hosts.stage.client.socket(VIP4, socket.SOCK_STREAM)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await asyncio.get_running_loop().sock_connect(channel, (VIP4, 443))
    channel.close()


async def test_the_edge_itself_reaches_its_own_balancer(hosts):
    await hosts.take(reply="way")
    hosts.stage.client, client = SimpleNamespace(socket=partial(Guest.socket, Guest(hosts.edge.netns))), hosts.stage.client
    try:
        flow = await hosts.stage.connect(VIP4)
        assert flow.seen_as == hosts.edge.address
        flow.reset()
    finally:
        hosts.stage.client = client


async def test_a_way_that_was_changed_beside_us_is_told_and_mended(hosts):
    await hosts.take(reply="way")
    document, ways = hosts.document(hosts.host), hosts.ways[hosts.host]
    name = ways.plan(document).inward[hosts.edge.id]
    with hosts.host.inside():
        for harm in (
            ("link", "set", name, "mtu", "1300"),
            ("rule", "del", "priority", "5190"),
            ("route", "flush", "table", str(FIRST_TABLE + 1)),
            ("neighbour", "flush", "dev", name, "nud", "permanent"),
            ("link", "del", name),
        ):
            ip(*harm)
            assert await ways.differences(document), harm
            await ways.apply(document)
            assert await ways.differences(document) == (), harm
    for vip, address in CLIENT.items():
        flow = await hosts.stage.connect(vip)
        assert flow.seen_as == address
        flow.reset()
