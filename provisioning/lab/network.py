"""The lab's underlay: a router namespace with a bridge, one link to the machine, one per host.

The one rule: nothing here has a fixed name or address in the machine's own namespace; both come from the lab's id, after
looking at what the machine uses.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from provisioning.lab.model import HostRecord, LabError, LabRecord

POOL = ipaddress.IPv4Network("198.18.0.0/15")  # RFC 2544: for tests, never routed
ROUTER = "router.netns"
FORWARDING = (Path("/proc/sys/net/ipv4/ip_forward"), Path("/proc/sys/net/ipv6/conf/all/forwarding"))
HOST_LINK = "eth0"
AGENT_ROUTES = "191"  # the routing protocol number of the agent's routes
COMMAND_SECONDS = 20
LOCK_NAME = "\0bedplate-lab-addresses"
GATEWAY_NAME = "bedplate-lab-gateway"  # an abstract socket of a gateway's pid 1: the first one's in a network namespace


def run(argv: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs one constant command with a deadline; raises LabError with what it said."""
    try:
        done = subprocess.run(
            argv, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise LabError(f"{' '.join(argv)}: no end after {COMMAND_SECONDS} s") from error
    if check and done.returncode != 0:
        raise LabError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done


@contextlib.contextmanager
def address_lock(deadline_seconds: float = 30) -> Iterator[None]:
    """One lab at a time chooses addresses in this network namespace: an abstract socket, which leaves no file."""
    end = time.monotonic() + deadline_seconds
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(LOCK_NAME)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise LabError("another lab has been choosing its addresses for too long") from error
                time.sleep(0.05)
        yield


def check_no_gateway() -> None:
    """Raises LabError while a lab has its gateway in this network namespace: two would write the same rules and routes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind(f"\0{GATEWAY_NAME}")
        except OSError as error:
            raise LabError(
                "another demo or lab has its gateway in this network namespace, and two would write the same rules and "
                "routes: end that one first (Ctrl-C, or its --clean), or start this one in a network namespace of its own"
            ) from error


def used_networks() -> list[ipaddress.IPv4Network]:
    """Every IPv4 destination in every routing table of the machine."""
    routes = json.loads(run(["ip", "-json", "-4", "route", "show", "table", "all"]).stdout or "[]")
    found = [route["dst"] for route in routes if route.get("dst") not in (None, "default")]
    return [ipaddress.IPv4Network(dst, strict=False) for dst in found]


def choose_networks() -> tuple[str, str]:
    """A free /24 of the pool and a fresh unique local /64 (RFC 4193)."""
    used = used_networks()
    choices = list(POOL.subnets(new_prefix=24))
    secrets.SystemRandom().shuffle(choices)
    for choice in choices:
        if not any(choice.overlaps(network) for network in used):
            return str(choice), str(ipaddress.IPv6Network(((0xFD << 40 | secrets.randbits(40)) << 80, 64)))
    raise LabError(f"no free /24 is left in {POOL}")


def in_router(directory: Path, argv: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(["nsenter", f"--net={directory / ROUTER}", "--", *argv], check=check)


def make_router(directory: Path, record: LabRecord) -> None:
    """The namespace (pinned by a mount in the lab's own directory), its bridge and the machine's link to it."""
    pin = directory / ROUTER
    pin.touch()
    run(["unshare", f"--net={pin}", "--", "true"])
    for argv in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "add", "bridge", "type", "bridge"],
        ["sysctl", "-qw", "net.ipv6.conf.bridge.disable_ipv6=1"],
        ["ip", "link", "set", "bridge", "up"],
        ["ip", "link", "add", "machine", "type", "veth", "peer", "name", record.link, "netns", str(os.getpid())],
        ["ip", "link", "set", "machine", "master", "bridge", "up"],
    ):
        in_router(directory, argv)
    run(["sysctl", "-qw", f"net.ipv6.conf.{record.link}.accept_ra=0"])
    for argv in addresses(record, record.link, 1):
        run(argv)


def addresses(record: LabRecord, link: str, number: int) -> list[list[str]]:
    """The commands that give a link its two addresses and bring it up. DAD is off: every address is chosen by us."""
    ipv4, ipv6 = record.network_ipv4, record.network_ipv6
    return [
        ["ip", "address", "add", f"{ipv4[number]}/{ipv4.prefixlen}", "dev", link],
        ["ip", "address", "add", f"{ipv6[number]}/{ipv6.prefixlen}", "dev", link, "nodad"],
        ["ip", "link", "set", link, "up"],
    ]


def host_commands(record: LabRecord, host: HostRecord) -> list[list[str]]:
    """What the host itself runs at boot. It has no default route: a lab has no way out unless a test makes one."""
    if host.kind == "gateway":
        return []
    return [
        ["ip", "link", "set", "lo", "up"],
        ["sysctl", "-qw", f"net.ipv6.conf.{HOST_LINK}.accept_ra=0"],
        *addresses(record, HOST_LINK, host.number),
    ]


def connect_host(directory: Path, record: LabRecord, host: HostRecord, pid: int) -> None:
    """A fresh link from the bridge into the network namespace of the process `pid`; its MAC is the same after a reboot."""
    port, octets = f"host{host.number}", bytes.fromhex(record.id)
    mac = ":".join(f"{octet:02x}" for octet in (0x02, *octets, host.number))
    peer = ["peer", "name", HOST_LINK, "address", mac, "netns", str(pid)]
    in_router(directory, ["ip", "link", "delete", port], check=False)
    in_router(directory, ["ip", "link", "add", port, "type", "veth", *peer])
    in_router(directory, ["ip", "link", "set", port, "master", "bridge", "up"])


def remember_sysctls(record: LabRecord) -> None:
    """What a gateway host's enrolment may change in the machine's own namespace, as it is before."""
    for path in FORWARDING:
        record.sysctls.setdefault(str(path), path.read_text().strip())


def restore_machine(record: LabRecord) -> None:
    """What a gateway host left in the machine's own namespace, unless another lab is here, whose gateway may still need it.

    Routes that refuse are the only ones that hang on no link, so they do not go with one.
    """
    others = [link["ifname"] for link in json.loads(run(["ip", "-json", "link"]).stdout)]
    if any(re.fullmatch(r"bl[0-9a-f]{8}", name) and name != record.link for name in others):
        return
    if record.sysctls:
        for family in ("-4", "-6"):
            run(["ip", family, "route", "flush", "proto", AGENT_ROUTES, "type", "unreachable"], check=False)
    for path, value in record.sysctls.items():
        if Path(path).read_text().strip() != value:
            Path(path).write_text(value)


def remove_router(directory: Path, record: LabRecord) -> None:
    """Deleting the machine's link takes its peer along; unmounting the pin takes the namespace."""
    run(["ip", "link", "delete", record.link], check=False)
    pin = directory / ROUTER
    if pin.exists():
        run(["umount", str(pin)], check=False)
        pin.unlink()
