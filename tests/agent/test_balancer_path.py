"""What lies between clients, edges and backends: narrow links, several edges beside each other, an edge that goes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostagent.lib.wait import until
from tests.agent.balancing import NAMES, VIP4, VIP6, Edge, Place, Stage, broken, ip, sysctl

pytestmark = pytest.mark.caps("root", "netns", "nft")
NARROW = 1300
LOUD = b"n" * 400_000
BOTH = pytest.mark.parametrize("vip", [VIP4, VIP6])


def path_mtu(channel: socket.socket) -> int:
    if channel.family == socket.AF_INET6:
        return channel.getsockopt(socket.IPPROTO_IPV6, 24)  # IPV6_MTU
    return channel.getsockopt(socket.IPPROTO_IP, 14)  # IP_MTU


def told(place: Place, vip: str) -> int:
    """How many "too big" messages this namespace has sent."""
    with place.inside():
        if vip == VIP6:
            lines = Path("/proc/thread-self/net/snmp6").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("Icmp6OutPktTooBigs"))
        names, values = (
            line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if "Icmp:" in line
        )
        return int(values[names.index("OutDestUnreachs")])


@pytest.fixture
def far(edge):
    """A client behind two routers with a narrow link between them; neither end knows of it."""
    near, beyond, client = places = [Place() for _ in range(3)]
    links = ((None, "f0", near, "r0", 1500), (near, "r1", beyond, "r0", NARROW), (beyond, "r1", client, "eth0", 1500))
    try:
        for number, (left, name, right, other, mtu) in enumerate(links):
            netns = left.name if left else ""
            ip("link", "add", name, "type", "veth", "peer", "name", other, "netns", right.name, netns=netns)
            for side, device, host in ((netns, name, 1), (right.name, other, 2)):
                ip("address", "add", f"198.18.{number}.{host}/24", "dev", device, netns=side)
                ip("address", "add", f"2001:db8:{number + 1}::{host}/64", "dev", device, "nodad", netns=side)
                ip("link", "set", device, "mtu", str(mtu), "up", netns=side)
            ip("route", "add", "default", "via", f"198.18.{number}.1", netns=right.name)
            ip("-6", "route", "add", "default", "via", f"2001:db8:{number + 1}::1", netns=right.name)
        for netns, number in (("", 0), (near.name, 1)):
            ip("route", "add", "198.18.2.0/24", "via", f"198.18.{number}.2", netns=netns)
            ip("-6", "route", "add", "2001:db8:3::/64", "via", f"2001:db8:{number + 1}::2", netns=netns)
        for place in (near, beyond):
            with place.inside():
                for key in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
                    sysctl(key, "1")
        mine, edge.stage.client = edge.stage.client, client
        yield near, beyond
        edge.stage.client = mine
    finally:
        for place in places:
            place.remove()


@pytest.mark.parametrize("client_address", ["kept", "masqueraded"])
@BOTH
async def test_too_big_for_the_way_reaches_the_right_end(edge, far, vip, client_address):
    """A router that cannot pass what a backend sends tells the VIP of it; the one backend whose flow it is must hear it."""
    near, beyond = far
    await edge.take(client_address=client_address)
    flow = await edge.stage.connect(vip)
    assert await flow.echo(LOUD) == LOUD
    assert told(near, vip) > 0, "of what the backend sent, to the VIP"
    assert told(beyond, vip) > 0, "of what the client sent"
    backend = next(backend for backend in edge.stage.backends if backend.name == flow.backend)
    assert {path_mtu(channel) for channel in backend.flows} == {NARROW}
    assert path_mtu(flow.channel) == NARROW
    flow.reset()


@BOTH
async def test_too_big_for_a_backend_is_told_to_the_client(edge, vip):
    """The edge itself speaks, of the packet that it has translated already; the client knows the VIP alone."""
    await edge.take()
    for number in range(1, len(NAMES) + 1):
        ip("link", "set", f"b{number}", "mtu", str(NARROW))
    flow = await edge.stage.connect(vip)
    assert await flow.echo(LOUD) == LOUD
    assert path_mtu(flow.channel) == NARROW
    flow.reset()


class TwoEdges:
    """A client, a router that spreads over two edges, and a network of backends behind both."""

    def __init__(self, directory: Path) -> None:
        self.stage = Stage()
        self.places = [Place() for _ in range(4)]
        self.router, self.fabric, *self.hosts = self.places
        self.edges = [Edge(self.stage, directory / str(number)) for number in (1, 2)]

    def build(self) -> None:
        for place in (self.router, *self.hosts):
            with place.inside():
                for key in ("net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"):
                    sysctl(key, "1")
        with self.router.inside():
            sysctl("net/ipv4/fib_multipath_hash_policy", "1")
            sysctl("net/ipv6/fib_multipath_hash_policy", "1")
        ip("link", "add", "br0", "type", "bridge", "mcast_snooping", "0", netns=self.fabric.name)
        ip("link", "set", "br0", "up", netns=self.fabric.name)
        self.wire(self.router, "c0", self.stage.client, "eth0", "198.51.100", "2001:db8:c")
        for number, host in enumerate(self.hosts, 1):
            self.wire(host, "r0", self.router, f"e{number}", f"192.0.{number}", f"2001:db8:e{number}")
            ip("route", "add", "198.51.100.0/24", "via", f"192.0.{number}.2", netns=host.name)
            ip("-6", "route", "add", "2001:db8:c::/64", "via", f"2001:db8:e{number}::2", netns=host.name)
            self.plug(host, f"h{number}", number)
        for number in range(1, 5):
            place = Place()
            self.places.append(place)
            self.plug(place, f"b{number}", 10 + number)
            self.stage.add(place, f"10.9.0.{10 + number}", f"fd00:9::{10 + number}")
        self.lead_through(1, 2)

    @staticmethod
    def wire(left: Place, name: str, right: Place, other: str, v4: str, v6: str) -> None:
        ip("link", "add", name, "type", "veth", "peer", "name", other, "netns", right.name, netns=left.name)
        for place, device, host in ((left, name, 1), (right, other, 2)):
            ip("address", "add", f"{v4}.{host}/24", "dev", device, netns=place.name)
            ip("address", "add", f"{v6}::{host}/64", "dev", device, "nodad", netns=place.name)
            ip("link", "set", device, "up", netns=place.name)
        if other == "eth0":
            ip("route", "add", "default", "via", f"{v4}.1", netns=right.name)
            ip("-6", "route", "add", "default", "via", f"{v6}::1", netns=right.name)

    def plug(self, place: Place, port: str, number: int) -> None:
        ip("link", "add", port, "type", "veth", "peer", "name", "fab0", "netns", place.name, netns=self.fabric.name)
        ip("link", "set", port, "master", "br0", "up", netns=self.fabric.name)
        ip("address", "add", f"10.9.0.{number}/24", "dev", "fab0", netns=place.name)
        ip("address", "add", f"fd00:9::{number}/64", "dev", "fab0", "nodad", netns=place.name)
        ip("link", "set", "fab0", "up", netns=place.name)

    def lead_through(self, *numbers: int) -> None:
        """The router's ways to the VIPs; what backends send to clients goes through the first."""
        for family, vip, way in (("-4", VIP4, "192.0.{}.1"), ("-6", VIP6, "2001:db8:e{}::1")):
            hops = [word for number in numbers for word in ("nexthop", "via", way.format(number))]
            ip(family, "route", "replace", vip, *hops, netns=self.router.name)
        for place in self.places[4:]:
            ip("route", "replace", "default", "via", f"10.9.0.{numbers[0]}", netns=place.name)
            ip("-6", "route", "replace", "default", "via", f"fd00:9::{numbers[0]}", netns=place.name)

    async def settle(self) -> None:
        """The kernel takes a moment to see that a link has two ends, and IPv6 prefers a way whose neighbour it knows."""

        async def is_up() -> bool:
            links = [link for place in self.places for link in json.loads(ip("-j", "link", netns=place.name))]
            return all(link["operstate"] == "UP" for link in links if link["ifname"] != "lo")

        assert await until(is_up, seconds=10)
        for number, host in enumerate(self.hosts, 1):
            await self.meet(self.router, f"192.0.{number}.1", f"2001:db8:e{number}::1")
            for backend in self.stage.backends:
                await self.meet(host, backend.ipv4, backend.ipv6)

    @staticmethod
    async def meet(place: Place, *addresses: str) -> None:
        for address in addresses:

            async def answers(address: str = address) -> bool:
                argv = ("ip", "netns", "exec", place.name, "ping", "-c1", "-W1", address)
                return subprocess.run(argv, check=False, capture_output=True, timeout=10).returncode == 0

            assert await until(answers, seconds=10)

    async def take(self, **changes) -> None:
        """Both edges get the same document."""
        wanted = self.edges[0].wanted(**changes)
        for host, edge in zip(self.hosts, self.edges, strict=True):
            with host.inside():
                await edge.balancers.take(wanted)

    async def ask(self, vip: str, port: int) -> tuple[str, str]:
        """(the backend, the edge by its address) of a connection from this port."""
        flow = await self.stage.connect(vip, source=("198.51.100.2" if vip == VIP4 else "2001:db8:c::2", port))
        flow.reset()
        return flow.backend, flow.seen_as

    async def close(self) -> None:
        for edge in self.edges:
            await edge.close()
        await self.stage.close()
        for place in self.places:
            place.remove()


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[TwoEdges]:
    made = TwoEdges(tmp_path)
    try:
        made.build()
        await made.settle()
        for backend in made.stage.backends:
            backend.listen()
        for host, edge in zip(made.hosts, made.edges, strict=True):
            with host.inside():
                await edge.start()
                await edge.flows.count()  # its socket is this namespace's
        yield made
    finally:
        await made.close()


@BOTH
async def test_flows_spread_over_two_edges_that_choose_alike(two, vip):
    """By source address and port: whichever edge the router takes, and when one is gone, it is the same backend."""
    await two.take()
    ports = range(20000, 20064)
    found = {port: await two.ask(vip, port) for port in ports}
    assert {backend for backend, _ in found.values()} == NAMES
    by_edge = [sum(1 for _, edge in found.values() if edge == name) for name in {edge for _, edge in found.values()}]
    assert len(by_edge) == 2, "both edges carry flows"
    assert min(by_edge) >= len(ports) / 5
    two.lead_through(2)
    after = {port: await two.ask(vip, port) for port in ports}
    assert len({edge for _, edge in after.values()}) == 1
    assert {port: backend for port, (backend, _) in after.items()} == {port: backend for port, (backend, _) in found.items()}


@BOTH
async def test_flows_of_an_edge_that_goes_are_carried_on_by_the_other(two, vip):
    """With the client's address kept nothing tells the edges apart; masqueraded, the backend sees a stranger and resets."""
    two.lead_through(1)
    await two.take(client_address="kept")
    flows = [await two.stage.connect(vip) for _ in range(8)]
    assert len({flow.backend for flow in flows}) > 1
    two.lead_through(2)
    for flow in flows:
        assert await flow.echo() == b"ping"
        flow.reset()

    two.lead_through(1)
    await two.take(client_address="masqueraded")
    flow = await two.stage.connect(vip)
    two.lead_through(2)
    started = time.monotonic()
    await broken(flow)
    assert time.monotonic() - started < 1


async def test_the_end_of_a_backend_is_the_same_at_both_edges(two):
    """Each edge learns by itself; what it does then is alike."""
    await two.take(algorithm="hash", hash_on="source_port")
    ports = range(21000, 21040)
    for edge in two.edges:
        edge.balancers.machine(["nic_bk_2"], is_running=False)
    async with asyncio.timeout(5):
        while any(edge.balancers.failovers.counts["process"] == 0 for edge in two.edges):
            await asyncio.sleep(0.005)
    found = {}
    for number in (1, 2):
        two.lead_through(number)
        found[number] = {port: (await two.ask(VIP4, port))[0] for port in ports}
    assert found[1] == found[2]
    assert set(found[1].values()) == NAMES - {"bk_2"}
