"""Clients, a balancer and backends in network namespaces of their own; sockets of all of them in this one process.

A socket belongs to the namespace in which it was made, so servers and clients need no processes: the thread goes there for a
moment. The thread itself lives in the balancer's namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import uuid
from collections import Counter
from dataclasses import replace
from pathlib import Path

from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_counts import BalancerCounts
from hostagent.drivers.network.conntrack import Conntrack
from hostagent.drivers.network.nft import best
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.lib.wait import until
from hostagent.protocol.network import BackendWanted, ListenerWanted, LoadBalancerWanted
from hostagent.protocol.wanted import Generation
from tests import namespaces

VIP4, VIP6 = "203.0.113.10", "2001:db8:f::10"
NAMES = {"bk_1", "bk_2", "bk_3", "bk_4"}
SECONDS = 5.0
ASK_AGAIN_SECONDS = 0.5


def ip(*words: str, netns: str = "") -> str:
    place = ("-n", netns) if netns else ()
    return subprocess.run(["ip", *place, *words], check=True, capture_output=True, text=True, timeout=10).stdout


def ip_batch(lines: list[str], netns: str = "") -> None:
    """Many commands in one process."""
    place = ("-n", netns) if netns else ()
    text = "".join(f"{line}\n" for line in lines)
    subprocess.run(["ip", *place, "-batch", "-"], check=True, capture_output=True, text=True, timeout=10, input=text)


def sysctl(key: str, value: str) -> None:
    Path("/proc/sys", key).write_text(value)


class Place:
    """A named network namespace."""

    def __init__(self) -> None:
        self.name = f"bpt{uuid.uuid4().hex[:8]}"
        ip("netns", "add", self.name)
        self.descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        ip("link", "set", "lo", "up", netns=self.name)
        self._sockets: list[socket.socket] = []

    def remove(self) -> None:
        """With the sockets that a test which failed has left open: the next test is not to hear of them."""
        for made in self._sockets:
            made.close()
        os.close(self.descriptor)
        ip("netns", "del", self.name)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return namespaces.inside(self.descriptor)

    def socket(self, address: str, kind: int) -> socket.socket:
        with self.inside():
            made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)
        self._sockets.append(made)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return made


class Backend:
    """Answers every TCP connection and every datagram with its name and whom it sees; then echoes."""

    def __init__(self, place: Place, name: str, ipv4: str, ipv6: str) -> None:
        self.place, self.name, self.ipv4, self.ipv6 = place, name, ipv4, ipv6
        self.accepted = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[socket.socket] = []
        self.flows: set[socket.socket] = set()

    def listen(self, port: int = 8080, addresses: tuple[str, ...] = ()) -> None:
        for address in addresses or (self.ipv4, self.ipv6):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                server = self.place.socket(address, kind)
                server.bind((address, port))
                if kind == socket.SOCK_STREAM:
                    server.listen(1024)
                self._servers.append(server)
                self._run(self._accept(server) if kind == socket.SOCK_STREAM else self._datagrams(server))

    def _run(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            flow, peer = await loop.sock_accept(server)
            self.accepted += 1
            self.flows.add(flow)
            self._run(self._echo(flow, peer))

    async def _echo(self, flow: socket.socket, peer) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.sock_sendall(flow, f"{self.name} {peer[0]}\n".encode())
            while data := await loop.sock_recv(flow, 65536):
                await loop.sock_sendall(flow, data)
        self.flows.discard(flow)
        flow.close()

    async def _datagrams(self, server: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            data, peer = await loop.sock_recvfrom(server, 65536)
            self.accepted += 1
            await loop.sock_sendto(server, f"{self.name} {peer[0]}\n".encode() + data, peer)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for item in (*self._servers, *self.flows):
            item.close()
        self._servers.clear()
        self.flows.clear()


class Stage:
    """`clients` and `backends` hang on the balancer, which is their gateway."""

    def __init__(self) -> None:
        self.client = Place()
        self._places = [self.client]
        self.backends: list[Backend] = []

    def build(self, backends: int = 4) -> None:
        for family in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            sysctl(f"net/{family}", "1")
        sysctl("net/netfilter/nf_conntrack_acct", "1")
        self._wire(self.client, "c0", 0, "198.51.100", "2001:db8:c")
        addresses = [f"198.51.100.{host}/24 dev eth0" for host in range(3, 40)]
        addresses.append("2001:db8:c::9/64 dev eth0 nodad preferred_lft 0")  # used by whoever binds to it
        ip_batch([f"address add {words}" for words in addresses], netns=self.client.name)
        for vip in (f"{VIP4}/32", f"{VIP6}/128"):
            ip("address", "add", vip, "dev", "lo")
        for number in range(1, backends + 1):
            place = Place()
            self._places.append(place)
            self._wire(place, f"b{number}", number, f"10.9.{number}", f"fd00:9:{number}")
            self.add(place, f"10.9.{number}.2", f"fd00:9:{number}::2")

    def add(self, place: Place, ipv4: str, ipv6: str) -> None:
        """One more backend."""
        self.backends.append(Backend(place, f"bk_{len(self.backends) + 1}", ipv4, ipv6))

    def _wire(self, place: Place, name: str, number: int, v4: str, v6: str) -> None:
        def up(link: str, host: int) -> list[str]:
            addresses = [f"address add {v4}.{host}/24 dev {link}", f"address add {v6}::{host}/64 dev {link} nodad"]
            return [*addresses, f"link set {link} up"]

        ip_batch([f"link add {name} type veth peer name eth0 netns {place.name}", *up(name, 1)])
        ip_batch([*up("eth0", 2), f"route add default via {v4}.1"], netns=place.name)
        ip("-6", "route", "add", "default", "via", f"{v6}::1", netns=place.name)

    async def close(self) -> None:
        for backend in self.backends:
            await backend.close()
        for place in self._places:
            place.remove()

    async def connect(self, vip: str, port: int = 443, source: tuple[str, int] | None = None) -> Flow:
        made = self.client.socket(vip, socket.SOCK_STREAM)
        try:
            if source is not None:
                made.bind(source)
            async with asyncio.timeout(SECONDS):
                await asyncio.get_running_loop().sock_connect(made, (vip, port))
                flow = Flow(made)
                flow.backend, flow.seen_as = (await flow.receive()).decode().split()
        except BaseException:
            made.close()
            raise
        return flow

    async def ask(self, vip: str, port: int = 443, source: tuple[str, int] | None = None) -> str:
        """The name of the backend that answers one TCP connection."""
        flow = await self.connect(vip, port, source)
        flow.reset()
        return flow.backend

    async def ask_udp(self, vip: str, port: int = 443, source: tuple[str, int] | None = None, channel=None) -> str:
        made = channel or self.client.socket(vip, socket.SOCK_DGRAM)
        loop = asyncio.get_running_loop()
        try:
            if channel is None:
                if source is not None:
                    made.bind(source)
                made.connect((vip, port))
            question = os.urandom(8)
            async with asyncio.timeout(SECONDS):
                while True:  # a datagram may be lost
                    await loop.sock_sendall(made, question)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ASK_AGAIN_SECONDS):
                            while not (answer := await loop.sock_recv(made, 2048)).endswith(question):
                                pass  # to a question before
                            return answer.decode(errors="replace").split()[0]
        finally:
            if channel is None:
                made.close()

    async def spread(self, vip: str, count: int, port: int = 443) -> Counter[str]:
        return Counter([await self.ask(vip, port) for _ in range(count)])


class Flow:
    backend = seen_as = ""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    async def receive(self) -> bytes:
        return await asyncio.get_running_loop().sock_recv(self.channel, 65536)

    async def echo(self, data: bytes = b"ping") -> bytes:
        async with asyncio.timeout(SECONDS):
            await asyncio.get_running_loop().sock_sendall(self.channel, data)
            found = b""
            while len(found) < len(data):
                piece = await self.receive()
                if not piece:
                    raise EOFError
                found += piece
        return found

    def reset(self) -> None:
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.channel.close()


async def broken(flow: Flow, seconds: float = 10.0) -> None:
    """The flow ends by a reset, never by silence."""

    async def is_broken() -> bool:
        try:
            await flow.echo()
        except (ConnectionError, EOFError):
            return True
        return False

    assert await until(is_broken, seconds=seconds)
    flow.reset()


class Edge:
    """The balancer of the host that is this thread's namespace."""

    def __init__(self, stage, directory) -> None:
        self.stage = stage
        self.rules = Ruleset(best())
        self.flows = Conntrack()
        self.balancers = Balancers(self.rules, directory, self.flows)
        self.counts = BalancerCounts(self.balancers)
        self.generation = 0

    async def start(self, *documents) -> None:
        await self.rules.start(self.balancers.restore(documents))
        self.balancers.start()

    def wanted(self, **changes) -> LoadBalancerWanted:
        self.generation += 1
        backends = tuple(
            BackendWanted(id=b.name, ipv4=b.ipv4, ipv6=b.ipv6, nic_id=f"nic_{b.name}") for b in self.stage.backends
        )
        plain = LoadBalancerWanted(
            id="lb_000000000001",
            generation=Generation(epoch=1, number=self.generation),
            vips=(VIP4, VIP6),
            listeners=(
                ListenerWanted(protocol="tcp", port=443, target_port=8080),
                ListenerWanted(protocol="udp", port=443, target_port=8080),
            ),
            backends=backends,
        )
        return replace(plain, **changes)

    async def take(self, **changes) -> LoadBalancerWanted:
        wanted = self.wanted(**changes)
        await self.balancers.take(wanted)
        return wanted

    def states(self, wanted, **by_name) -> tuple[BackendWanted, ...]:
        return tuple(replace(b, **by_name.get(b.id, {})) for b in wanted.backends)

    async def close(self) -> None:
        await self.counts.close()
        await self.balancers.close()
        await self.rules.close()
        self.flows.close()

    async def metric(self, name: str) -> dict[str, float]:
        """Its values by label text."""
        lines = [line for line in await self.counts.lines() if line.startswith(name)]
        return {line.partition("{")[2].rpartition("}")[0]: float(line.rpartition(" ")[2]) for line in lines}
