"""Two hosts in namespaces of their own, with a data network between them and a guest each, for tests that send packets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import signal
import socket
import subprocess
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

from hostagent.drivers.network.links import LinkSet
from hostagent.drivers.network.protocol import (
    LinkPlan,
    RoutePlan,
    interface_name,
    peer_name,
)
from hostagent.drivers.network.reach import (
    TunnelsObserved,
)
from hostagent.drivers.network.routes import RouteSet
from hostagent.drivers.network.tunnel_keys import TunnelKeys
from hostagent.drivers.network.wireguard import WireGuard
from hostagent.lib.paths import Paths
from hostagent.lib.seal import HostSealer
from hostagent.protocol.network import TunnelInterfaceWanted, TunnelPeerWanted, TunnelWanted
from hostagent.protocol.wanted import Generation, NetworkWanted, NicWanted, RouteWanted
from tests.conformance.conftest import Daemon
from tests.namespaces import inside

ONE = Generation(epoch=1, number=1)
PORTS = {"a": 51820, "b": 51821}
RECEIVED = re.compile(r"(\d+) packets transmitted, (\d+) received")
SEQUENCE = re.compile(rb"icmp_seq=(\d+) ttl=")


def run(*argv: str, check: bool = True, seconds: float = 20) -> str:
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=seconds)
    assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


class Side:
    """One host: number 1 or 2. Its guest has 10.93.N.1 and fd00:93:N::1, the host itself 10.93.255.N."""

    def __init__(self, root: Path, number: int, mtu_bytes: int) -> None:
        self.number = number
        self.netns = f"bp-{uuid.uuid4().hex[:8]}"
        self.guest = f"{self.netns}-g"
        machine_id = root / f"{number}.machine-id"
        machine_id.write_text(uuid.uuid4().hex)
        directory = root / str(number)
        directory.mkdir()
        self.paths = dataclasses.replace(Paths.under(directory), machine_id=machine_id)
        self.daemon = Daemon(self.paths)
        self.keys = TunnelKeys(self.paths.tunnel_keys, HostSealer(self.paths.host_key))
        self.tunnels = WireGuard(self.daemon.driver, self.paths, self.keys)
        self.routes = RouteSet(self.tunnels.names)
        self.nic = NicWanted(
            id=f"nic_{uuid.uuid4().hex[:26]}",
            generation=ONE,
            mac=f"06:00:00:00:93:0{number}",
            ipv4=f"10.93.{number}.1",
            ipv6=f"fd00:93:{number}::1",
            mtu_bytes=mtu_bytes,
        )

    @property
    def id(self) -> str:
        return f"host_{self.number}"

    @property
    def address(self) -> str:
        return f"10.93.255.{self.number}"

    @property
    def allowed(self) -> tuple[str, ...]:
        return (f"{self.address}/32", f"{self.nic.ipv4}/32", f"{self.nic.ipv6}/128")

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return inside(self.netns)

    def peer(self, slot: str, public_key: str, allowed: tuple[str, ...] | None = None) -> TunnelPeerWanted:
        """This host as a peer of the other one."""
        return TunnelPeerWanted(
            host_id=self.id,
            slot=slot,
            public_key=public_key,
            endpoint_address=f"192.0.2.{self.number}",
            endpoint_port=PORTS[slot],
            allowed_cidrs=self.allowed if allowed is None else allowed,
        )

    async def tunnel(self, slots: dict[str, int], *peers: TunnelPeerWanted) -> TunnelsObserved:
        interfaces = tuple(
            TunnelInterfaceWanted(slot=slot, listen_port=PORTS[slot], key_generation=generation)
            for slot, generation in slots.items()
        )
        wanted = TunnelWanted(id="tunnel", generation=ONE, interfaces=interfaces, peers=peers, addresses=(self.address,))
        with self.inside():
            seen = await self.tunnels.apply(wanted)
            assert await self.tunnels.observe(wanted) is not None
        return seen

    async def route(self, other: Side, slot: str) -> None:
        routes = tuple(RouteWanted(destination_cidr=cidr, via="", slot=slot) for cidr in other.allowed)
        refused = (f"10.93.{other.number}.0/24", f"fd00:93:{other.number}::/64")
        wanted = NetworkWanted(id="routes", generation=ONE, routes=routes, unreachable_cidrs=refused)
        with self.inside():
            await self.routes.apply(RoutePlan(wanted=wanted, data_interface="data0"))

    def guest_argv(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.guest, *argv]

    def ping(self, address: str, *options: str) -> tuple[int, int, str]:
        """Sent, received, and what it said."""
        said = run(*self.guest_argv("ping", "-n", "-q", *options, address), check=False)
        found = RECEIVED.search(said)
        return (int(found[1]), int(found[2]), said) if found else (0, 0, said)

    async def start(self, other: Side | None) -> None:
        run("ip", "netns", "add", self.netns)
        run("ip", "netns", "add", self.guest)
        with self.inside():
            run("ip", "link", "set", "lo", "up")
            if other is not None:
                run("ip", "link", "add", "data0", "type", "veth", "peer", "name", "data0", "netns", other.netns)
            await self.daemon.start()
            plan = LinkPlan(nic=self.nic, kind="veth", interface=interface_name(self.nic.id), peer=peer_name(self.nic.id))
            await LinkSet().apply(plan)
            run("ip", "link", "set", plan.peer, "netns", self.guest)
        for words in (
            ("link", "set", plan.peer, "name", "eth0"),
            ("link", "set", "eth0", "mtu", str(self.nic.mtu_bytes), "up"),
            ("address", "add", f"{self.nic.ipv4}/32", "dev", "eth0"),
            ("address", "add", f"{self.nic.ipv6}/128", "dev", "eth0", "nodad"),
            ("route", "add", "default", "via", "169.254.1.1", "dev", "eth0", "onlink"),
            ("-6", "route", "add", "default", "via", "fe80::1", "dev", "eth0", "onlink"),
        ):
            run(*self.guest_argv("ip", *words))

    def connect(self) -> None:
        with self.inside():
            run("ip", "address", "add", f"192.0.2.{self.number}/24", "dev", "data0")
            run("ip", "link", "set", "data0", "up")

    def capture(self) -> socket.socket:
        """Everything that passes the data interface from now on."""
        with self.inside():
            wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
            wire.bind(("data0", 0))
        wire.setblocking(False)
        return wire

    async def stop(self) -> None:
        with self.inside(), contextlib.suppress(Exception):
            await self.tunnels.remove()
        if self.daemon.process is not None:
            await self.daemon.stop()
        run("ip", "netns", "delete", self.netns, check=False)
        run("ip", "netns", "delete", self.guest, check=False)


@contextlib.asynccontextmanager
async def two_hosts(root: Path, *, mtu_bytes: int = 1420) -> AsyncIterator[tuple[Side, Side]]:
    one, two = Side(root, 1, mtu_bytes), Side(root, 2, mtu_bytes)
    try:
        await two.start(None)
        await one.start(two)
        one.connect()
        two.connect()
        yield one, two
    finally:
        await one.stop()
        await two.stop()


async def joined(one: Side, two: Side, slots: dict[str, int]) -> None:
    """Both with the same interfaces and each other as peers in all of them."""
    keys = {side: {slot: await side.keys.public(slot, n) for slot, n in slots.items()} for side in (one, two)}
    for side, other in ((one, two), (two, one)):
        await side.tunnel(slots, *(other.peer(slot, keys[other][slot]) for slot in slots))


async def heard(side: Side, other: Side, slots: dict[str, int]) -> bool:
    keys = {slot: await other.keys.public(slot, n) for slot, n in slots.items()}
    seen = await side.tunnel(slots, *(other.peer(slot, key) for slot, key in keys.items()))
    return all(other.id in interface.heard_host_ids for interface in seen.interfaces)


def frames(wire: socket.socket) -> list[bytes]:
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(wire.recv(65_536))
    return found


class Pinging:
    """An echo request every 10 ms, until `ended`."""

    def __init__(self, side: Side, address: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `ended`
        argv = side.guest_argv("ping", "-n", "-i", "0.01", "-W", "2", address)
        self._process = subprocess.Popen(argv, stdout=self._said)

    async def ended(self) -> tuple[int, int]:
        """How many were sent and answered, up to the last one that was answered: later ones may be on their way."""
        self._process.send_signal(signal.SIGINT)
        await asyncio.to_thread(self._process.wait)
        self._said.seek(0)
        answered = {int(number) for number in SEQUENCE.findall(self._said.read())}
        self._said.close()
        return max(answered, default=0), len(answered)
