"""Tunnels between two lab hosts, by their agents: an encrypted and a plain network, new keys, a killed agent, a reboot."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hostagent.protocol.network import TunnelInterfaceWanted, TunnelPeerWanted, TunnelWanted
from hostagent.protocol.verbs import Subject
from hostagent.protocol.wanted import Generation, NetworkWanted, RouteWanted
from provisioning.lab import HostSpec, Lab
from tests.conformance.wires import RECEIVED, frames
from tests.namespaces import inside
from tests.system.agenthost import AgentHost, can_connect

pytestmark = [pytest.mark.caps("root", "netns", "sshd", "wireguard"), pytest.mark.slow]
SECRET, PLAIN = "c0ffee", "beef"
PORTS = {"a": 51820, "b": 51821}


@pytest.fixture
def lab(tmp_path):
    with Lab("tunnel", tmp_path / "lab", tuple(HostSpec(name=name, cores=1, memory_bytes=1 << 30) for name in "ab")) as lab:
        yield lab


class Node(AgentHost):
    """Machine N of the encrypted network has 10.93.N.1 and fd00:93:N::1, that of the plain one 10.94.N.1."""

    number = 0
    generation = 0

    @property
    def machines(self) -> tuple[str, str]:
        return f"10.93.{self.number}.1", f"fd00:93:{self.number}::1"

    def make_machines(self) -> None:
        for address in (f"{self.machines[0]}/32", f"{self.machines[1]}/128", f"10.94.{self.number}.1/32"):
            self.host.exec(["ip", "address", "replace", address, "dev", "lo"])

    def next(self) -> Generation:
        self.generation += 1
        return Generation(epoch=1, number=self.generation)

    def tunnel(self, slots: dict[str, int], *peers: TunnelPeerWanted) -> TunnelWanted:
        interfaces = tuple(TunnelInterfaceWanted(slot=s, listen_port=PORTS[s], key_generation=n) for s, n in slots.items())
        own = (f"10.93.255.{self.number}",)
        return TunnelWanted(id="tunnel", generation=self.next(), interfaces=interfaces, peers=peers, addresses=own)

    async def peers(self, other: Node) -> tuple[TunnelPeerWanted, ...]:
        """The other host in every slot of which it has a key."""
        seen = (await other.call("tunnel.observe", Subject(id="tunnel"))).object
        assert seen is not None
        return tuple(
            TunnelPeerWanted(
                host_id=other.host.name,
                slot=slot,
                public_key=str(seen.detail[f"public_key_{slot}"]),
                endpoint_address=other.host.data_address,
                endpoint_port=PORTS[slot],
                allowed_cidrs=(f"{other.machines[0]}/32", f"{other.machines[1]}/128", f"10.93.255.{other.number}/32"),
            )
            for slot in PORTS
            if f"public_key_{slot}" in seen.detail
        )

    async def hears(self, slot: str, *, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while True:
                seen = (await self.call("tunnel.observe", Subject(id="tunnel"))).object
                if seen is not None and seen.detail.get(f"heard_{slot}"):
                    return
                await asyncio.sleep(0.2)

    async def route(self, other: Node, slot: str) -> None:
        cidrs = (f"{other.machines[0]}/32", f"{other.machines[1]}/128", f"10.93.255.{other.number}/32")
        routes = (
            *(RouteWanted(destination_cidr=cidr, via="", slot=slot) for cidr in cidrs),
            RouteWanted(destination_cidr=f"10.94.{other.number}.1/32", via=other.host.data_address),
        )
        refused = ("10.93.0.0/16", "fd00:93::/32")
        await self.ensure(
            "network", NetworkWanted(id="routes", generation=self.next(), routes=routes, unreachable_cidrs=refused)
        )

    def ping(self, source: str, target: str, *options: str) -> int:
        """How many answers came."""
        said = self.host.exec(["ping", "-n", "-q", "-W2", "-I", source, *options, target], check=False, timeout=60).stdout
        found = RECEIVED.search(said.decode())
        return int(found[2]) if found else 0

    def kill_agent(self) -> None:
        self.host.exec(["pkill", "-KILL", "-of", "agent.pyz serve"])


async def both(one: Node, two: Node, slots: dict[str, int]) -> None:
    for node, other in ((one, two), (two, one)):
        peers = tuple(peer for peer in await node.peers(other) if peer.slot in slots)
        await node.ensure("tunnel", node.tunnel(slots, *peers))


async def test_two_hosts_and_their_networks(lab):
    one, two = Node(lab.host("a")), Node(lab.host("b"))
    for number, node in enumerate((one, two), start=1):
        node.number = number
        node.install()
        await node.ready()
        node.make_machines()
        await node.ensure("tunnel", node.tunnel({"a": 1}))
    await both(one, two, {"a": 1})
    await one.route(two, "a")
    await two.route(one, "a")

    with inside(f"/proc/{lab.host('a').pid}/ns/net"):
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        wire.bind(("eth0", 0))
        wire.setblocking(False)
    for source, target in zip(one.machines, two.machines, strict=True):
        for size in ("1400", "9000"):
            assert one.ping(source, target, "-c2", "-i0.1", "-s", size, "-p", SECRET) == 2
    assert one.ping("10.94.1.1", "10.94.2.1", "-c2", "-i0.1", "-p", PLAIN) == 2
    passed = b"".join(frames(wire))
    wire.close()
    assert bytes.fromhex(SECRET * 2) not in passed
    assert bytes.fromhex(PLAIN * 4) in passed  # the plain network's packets are seen: the capture was one

    await _rotation_under_pings(one, two)
    await _reboot(one, two)

    for node in (one, two):
        await node.purge("tunnel", "tunnel", node.next())
        await node.purge("network", "routes", node.next())
        assert "bw" not in node.host.exec(["ip", "-o", "link"]).stdout.decode()
        assert node.host.exec(["pgrep", "wireguard-go"], check=False).stdout == b""
        assert list((node.host.disk / "var/lib/bedplate/tunnel").iterdir()) == []


async def _rotation_under_pings(one: Node, two: Node) -> None:
    """The agent of the first host is killed in the middle; packets go on, and so does the rotation after it."""
    pings = [
        await asyncio.create_subprocess_exec(
            *one.host.exec_argv(["ping", "-n", "-q", "-i", "0.02", "-W", "5", "-I", source, target]),
            stdout=asyncio.subprocess.PIPE,
        )
        for source, target in zip(one.machines, two.machines, strict=True)
    ]
    try:
        await _rotate(one, two)
    finally:
        one.host.exec(["pkill", "-INT", "-x", "ping"])  # nsenter hands no signal on
        said = [(await process.communicate())[0].decode() for process in pings]
    for words in said:
        found = RECEIVED.search(words)
        assert found, words
        assert found[1] == found[2], words
        assert int(found[1]) > 50


async def _rotate(one: Node, two: Node) -> None:
    slots = {"a": 1, "b": 2}
    await two.ensure("tunnel", two.tunnel(slots, *await two.peers(one)))
    document = one.tunnel(slots, *await one.peers(two))
    asking = asyncio.ensure_future(one.call("tunnel.ensure", document))
    await asyncio.sleep(0.05)
    one.kill_agent()
    await asyncio.gather(asking, return_exceptions=True)
    await one.ready()
    await one.ensure("tunnel", document)
    await both(one, two, slots)
    await one.hears("b")
    await two.hears("b")
    await one.route(two, "b")
    await two.route(one, "b")
    await both(one, two, {"b": 2})


async def _reboot(one: Node, two: Node) -> None:
    """As after a power cut: the same keys, and the way is there again without anybody's word."""
    before = await two.peers(one)
    await asyncio.to_thread(one.host.reboot)
    await one.ready()
    one.make_machines()
    argv = ["ping", "-n", "-q", "-c1", "-W1", "-I", one.machines[0], two.machines[0]]
    await asyncio.to_thread(can_connect, one.host, argv, seconds=30)
    assert await two.peers(one) == before
    assert two.ping(two.machines[1], one.machines[1], "-c1") == 1
