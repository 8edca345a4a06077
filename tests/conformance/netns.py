"""Namespaces beside the test's own: machines on links that the real driver made, and an outside world behind an uplink.

Sockets are made inside a namespace and used from outside of it: a socket stays where it was made.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
from dataclasses import dataclass, field

from hostagent.drivers.network.links import LinkSet
from hostagent.drivers.network.protocol import HOST_MAC, LinkPlan, interface_name, peer_name
from hostagent.protocol.wanted import Generation, NicWanted
from tests import namespaces

ONE = Generation(epoch=1, number=1)
ANSWER_SECONDS = 5.0
SILENCE_SECONDS = 0.3


class Netns:
    """An empty network namespace. `close` ends it, with whatever was moved into it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; exec sleep 600"], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"\n"
        self.pid = self._holder.pid
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        inside = ("nsenter", "-t", str(self.pid), "-n", *argv)
        return subprocess.run(inside, check=check, capture_output=True, timeout=20)

    def inside(self) -> contextlib.AbstractContextManager[None]:
        return namespaces.inside(f"/proc/{self.pid}/ns/net")

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()


@dataclass(kw_only=True)
class Place:
    """Somebody with an address of each family, in a namespace or (None) in the test's own."""

    netns: Netns | None
    ipv4: str
    ipv6: str
    sockets: list[socket.socket] = field(default_factory=list)

    def address(self, version: int) -> str:
        return self.ipv6 if version == 6 else self.ipv4

    def socket(self, version: int, kind: socket.SocketKind) -> socket.socket:
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        with self.netns.inside() if self.netns else contextlib.nullcontext():
            made = socket.socket(family, kind)
        made.settimeout(ANSWER_SECONDS)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.sockets.append(made)
        return made

    def listen(self, version: int, port: int) -> socket.socket:
        made = self.socket(version, socket.SOCK_STREAM)
        made.bind(("::" if version == 6 else "0.0.0.0", port))
        made.listen(16)
        return made

    def bound(self, version: int, port: int) -> socket.socket:
        made = self.socket(version, socket.SOCK_DGRAM)
        made.bind((self.address(version), port))
        return made

    def connects(self, address: str, port: int, *, seconds: float = SILENCE_SECONDS) -> socket.socket | None:
        """A connection, or None when nobody answers (or refuses) within the time."""
        made = self.socket(6 if ":" in address else 4, socket.SOCK_STREAM)
        made.settimeout(seconds)
        try:
            made.connect((address, port))
        except OSError:
            made.close()
            return None
        made.settimeout(ANSWER_SECONDS)
        return made

    def pings(self, address: str, *, size: int = 56, seconds: float = 3) -> bool:
        argv = ("ping", "-n", "-q", "-c1", f"-W{seconds:g}", f"-s{size}", "-Mdo", address)
        done = (
            self.netns.run(*argv, check=False)
            if self.netns
            else subprocess.run(argv, check=False, capture_output=True, timeout=20)
        )
        return done.returncode == 0

    def close(self) -> None:
        for made in self.sockets:
            made.close()
        if self.netns is not None:
            self.netns.close()


@dataclass(kw_only=True)
class Machine(Place):
    """A namespace at the far end of a link, set up as a guest is by its seed."""

    nic: NicWanted
    peer: str

    def frames(self) -> socket.socket:
        """For whole frames, as a guest that obeys nobody sends them."""
        assert self.netns is not None
        with self.netns.inside():
            made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        made.bind((self.peer, 0))
        self.sockets.append(made)
        return made


async def make_machine(number: int, *, mtu_bytes: int = 1500) -> Machine:
    nic = NicWanted(
        id=f"nic_{number:012}",
        generation=ONE,
        mac=f"06:00:00:00:01:{number:02x}",
        ipv4=f"10.93.0.{number}",
        ipv6=f"fd93::{number:x}",
        mtu_bytes=mtu_bytes,
    )
    plan = LinkPlan(nic=nic, kind="veth", interface=interface_name(nic.id), peer=peer_name(nic.id))
    await LinkSet().apply(plan)
    netns = Netns()
    subprocess.run(["ip", "link", "set", plan.peer, "netns", str(netns.pid)], check=True, timeout=10)
    for words in (
        ("link", "set", plan.peer, "mtu", str(mtu_bytes), "up"),
        ("address", "add", f"{nic.ipv4}/32", "dev", plan.peer),
        ("address", "add", f"{nic.ipv6}/128", "dev", plan.peer, "nodad"),
        ("route", "add", "default", "via", "169.254.1.1", "dev", plan.peer, "onlink"),
        ("-6", "route", "add", "default", "via", "fe80::1", "dev", plan.peer, "onlink"),
    ):
        netns.run("ip", *words)
    return Machine(netns=netns, ipv4=nic.ipv4, ipv6=nic.ipv6, nic=nic, peer=plan.peer)


def make_outside(name: str = "up0") -> tuple[Place, Place]:
    """(the host on its uplink, somebody outside): 192.0.2.1 and .2, 2001:db8::1 and ::2. Outside knows no private address."""
    netns = Netns()
    peer = f"{name}p"
    words = (("link", "add", name, "type", "veth", "peer", "name", peer), ("link", "set", peer, "netns", str(netns.pid)))
    for more in words:
        subprocess.run(["ip", *more], check=True, timeout=10)
    for number, device in ((1, name), (2, peer)):
        for more in (
            ("link", "set", device, "up"),
            ("address", "add", f"192.0.2.{number}/24", "dev", device),
            ("address", "add", f"2001:db8::{number}/64", "dev", device, "nodad"),
        ):
            netns.run("ip", *more) if number == 2 else subprocess.run(["ip", *more], check=True, timeout=10)
    return Place(netns=None, ipv4="192.0.2.1", ipv6="2001:db8::1"), Place(netns=netns, ipv4="192.0.2.2", ipv6="2001:db8::2")


def frame(source_mac: str, kind: int, payload: bytes, *, destination_mac: str = HOST_MAC) -> bytes:
    macs = b"".join(bytes.fromhex(mac.replace(":", "")) for mac in (destination_mac, source_mac))
    return macs + kind.to_bytes(2, "big") + payload


def checksum(data: bytes) -> int:
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data)) if len(data) % 2 == 0 else checksum(data + b"\0") ^ 0xFFFF
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def udp(source: str, destination: str, port: int, payload: bytes = b"spoofed!") -> tuple[int, bytes]:
    """(ether type, packet) of a datagram from port 4000."""
    version = 6 if ":" in source else 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    ends = socket.inet_pton(family, source) + socket.inet_pton(family, destination)
    length = 8 + len(payload)
    pseudo = ends + (struct.pack("!I3xB", length, 17) if version == 6 else struct.pack("!BBH", 0, 17, length))
    header = struct.pack("!HHH", 4000, port, length)
    body = header + struct.pack("!H", checksum(pseudo + header + b"\0\0" + payload)) + payload
    if version == 6:
        return 0x86DD, struct.pack("!IHBB", 0x6000_0000, length, 17, 64) + ends + body
    head = struct.pack("!BBHHHBB", 0x45, 0, 20 + length, 1, 0, 64, 17)
    return 0x0800, head + struct.pack("!H", checksum(head + b"\0\0" + ends)) + ends + body


def icmp6(source: str, destination: str, body: bytes) -> tuple[int, bytes]:
    """(ether type, packet) with hop limit 255; `body` starts with type and code, its checksum is filled in."""
    ends = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(socket.AF_INET6, destination)
    pseudo = ends + struct.pack("!I3xB", len(body), 58)
    summed = body[:2] + struct.pack("!H", checksum(pseudo + body)) + body[4:]
    return 0x86DD, struct.pack("!IHBB", 0x6000_0000, len(body), 58, 255) + ends + summed


def arp(operation: int, sender_mac: str, sender: str, target: str) -> tuple[int, bytes]:
    macs = bytes.fromhex(sender_mac.replace(":", ""))
    return 0x0806, struct.pack("!HHBBH", 1, 0x0800, 6, 4, operation) + macs + socket.inet_aton(sender) + bytes(
        6
    ) + socket.inet_aton(target)
