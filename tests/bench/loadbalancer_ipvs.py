"""The load balancer beside the kernel's own, and with its flowtable: `python -m tests.bench.loadbalancer_ipvs [--json] [--quick]`.

An emulated server (see `provisioning.lab.metal`) is started, as neither IPVS nor flowtables are in every kernel; there this runs
again with `--here`. Namespaces are client, balancers side by side, and backends. IPVS is `mh` by source address and port, with NAT
and nothing else; ours has two hundred services (a thousand take an emulated server minutes), limits, counters, a policy and
firewalls. Emulated, only the ratios mean anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from hostagent.drivers.network.conntrack import MSG_DELETE, NFNL_SUBSYS_CTNETLINK
from hostagent.drivers.network.nfnetlink import NETLINK_NETFILTER, NLM_F_ACK, NLM_F_REQUEST, message
from tests import namespaces
from tests.agent.balancing import Place, ip, sysctl
from tests.bench.loadbalancer_edge import Edge, firewall_parts, service
from tests.bench.loadbalancer_stage import (
    BACKENDS,
    BARE,
    OURS,
    PORT,
    Stage,
    added,
    backend,
    in_turns,
    kernel_threads,
    median,
    row,
)

SERVICES = 200
MODES = ("direct", "ipvs", "ours")
IPVS = f"""
from socket import IPPROTO_TCP
from pyroute2 import IPVS, IPVSDest, IPVSService
kernel = IPVS()
service = IPVSService(addr="{BARE}", port=443, protocol=IPPROTO_TCP, sched_name="mh", flags={{"flags": 0x10, "mask": 0xFFFFFFFF}})
kernel.service("add", service=service)
for number in range(1, {BACKENDS} + 1):
    kernel.dest("add", service=service, dest=IPVSDest(addr=f"10.9.1.{{number * 4 + 2}}", port={PORT}, fwd_method=0))
"""


class KernelStage(Stage):
    """Number 0 routes, 1 has IPVS, 2 (this thread's namespace) has the agent's table; the backends are no machines of it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="bedplate-bench-"))
        self.client, self.servers, self.plain, self.bare = (Place() for _ in range(4))
        self.children = []

    def build(self) -> None:
        for number, place in enumerate((self.plain, self.bare, None)):
            self._wire(number, place)
        for number, address in ((2, OURS), (1, BARE)):
            ip("route", "add", f"{address}/32", "via", f"198.51.{number}.1", netns=self.client.name)
        ip("address", "add", f"{BARE}/32", "dev", "lo", netns=self.bare.name)
        argv = ["nsenter", f"--net=/run/netns/{self.bare.name}", sys.executable, "-c", IPVS]
        subprocess.run(argv, check=True, timeout=120)
        for index in range(1, BACKENDS + 1):  # a machine's link is no uplink, and its name says which it is
            ip("link", "set", f"bp00000000000{index}", "down")
            ip("link", "set", f"bp00000000000{index}", "name", f"data{index}")
            ip("link", "set", f"data{index}", "up")
        self.server = self._start(self.servers, sys.executable, "-m", "tests.bench.loadbalancer_load", "server", str(PORT))
        self.server.process.stdout.readline()
        self.load = self._start(self.client, sys.executable, "-m", "tests.bench.loadbalancer_load", "client", is_asked=True)
        self.ksoftirqd = kernel_threads()

    def forget_flows(self) -> None:
        """All of them; a server has no program for it."""
        for place in (self.plain, self.bare, None):
            with place.inside() if place else contextlib.nullcontext():
                kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
            with kernel:
                kernel.send(message(NFNL_SUBSYS_CTNETLINK << 8 | MSG_DELETE, NLM_F_REQUEST | NLM_F_ACK, 1, 0))
                kernel.recv(4096)

    def paths(self) -> dict[str, tuple[str, int]]:
        return {"direct": (backend(0, 1), PORT), "ipvs": (BARE, 443), "ours": (OURS, 443)}


async def measure(stage: Stage, *, is_quick: bool) -> list[dict[str, Any]]:
    rounds, count, size = (1, 50, 16 << 20) if is_quick else (11, 100, 32 << 20)
    connections, stream = {"do": "connections", "count": count}, {"do": "stream", "size": size}
    uplinks = ("c0", *(f"data{index}" for index in range(1, BACKENDS + 1)))
    rows = []
    for name, links in (("", ()), ("_flowtable", uplinks)):
        async with running(links):
            short = await asyncio.to_thread(in_turns, stage, MODES, rounds, connections)
            long = await asyncio.to_thread(in_turns, stage, MODES, rounds, stream)
        rows += compared(f"cpu_us_per_connection{name}", "µs", short, count * 1000)
        rows += compared(f"cpu_seconds_per_gb{name}", "s/GB", long, size)  # nanoseconds a byte
    return rows


def compared(name: str, unit: str, found: dict[str, list[dict[str, float]]], divisor: int) -> list[dict[str, Any]]:
    """All of it (which is what a packet's senders and receivers pay, too), the part that was added, the direct path's."""
    whole = {mode: median(found, mode, "cpu") / divisor for mode in MODES}
    more = {mode: added(found, mode, "cpu") / divisor for mode in MODES}
    return [
        row(name, whole["ours"], unit, "IPVS mh", whole["ipvs"]),
        row(f"added_{name}", more["ours"], unit, "IPVS mh", more["ipvs"]),
        row(f"{name}_direct", whole["direct"], unit),
    ]


@contextlib.asynccontextmanager
async def running(uplinks: tuple[str, ...]) -> AsyncIterator[None]:
    """The agent's table, with what an edge host has in it."""
    with tempfile.TemporaryDirectory(prefix="bedplate-bench-") as directory:
        edge = Edge(Path(directory))
        edge.balancers.uplinks = uplinks
        parts = edge.balancers.restore(service(number) for number in range(SERVICES))
        await edge.rules.start({**parts, **firewall_parts()})
        try:
            yield
        finally:
            await edge.rules.driver.remove()
            await edge.close()


def here(*, is_quick: bool) -> list[dict[str, Any]]:
    with namespaces.own():
        stage = KernelStage()
        try:
            for module in ("ip_vs", "ip_vs_mh", "nf_flow_table", "nf_flow_table_inet"):
                subprocess.run(["modprobe", module], check=True, timeout=60)
            sysctl("net/netfilter/nf_conntrack_acct", "1")
            stage.build()
            return asyncio.run(measure(stage, is_quick=is_quick))
        finally:
            stage.close()


def on_a_server(*, is_quick: bool) -> list[dict[str, Any]]:
    from provisioning.lab.metal import MetalHost, MetalSpec
    from tests.metal.shipping import shipped

    with tempfile.TemporaryDirectory(prefix="bedplate-metal-") as directory:
        with MetalHost(Path(directory) / "server", MetalSpec(name="metal1")) as server, shipped(server) as python:
            words = ["--quick"] if is_quick else []
            argv = [*python, "-m", "tests.bench.loadbalancer_ipvs", "--here", *words]
            done = server.exec(argv, timeout=3600)
            return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    parser.add_argument("--here", action="store_true", help="in this machine's kernel")
    options = parser.parse_args()
    rows = (here if options.here else on_a_server)(is_quick=options.quick)
    if options.json or options.here:
        print(json.dumps(rows, ensure_ascii=False))
        return
    print("| metric | ours | unit | peer | peer's | ratio |\n|---|---:|---|---|---:|---:|")
    for one in rows:
        values = (one["metric"], one["ours"], one["unit"], one.get("peer", ""), one.get("peer_value", ""), one.get("ratio", ""))
        print(f"| {' | '.join(str(value) for value in values)} |")


if __name__ == "__main__":
    main()
