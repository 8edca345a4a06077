"""What one more machine, rule or firewall costs on a host that has 1,000 of each: `python -m tests.bench.firewalls --json [--quick]`.

Everything goes through the agent's own parts, helper and batches into this process's own network namespace. `full` rows are at
1,000, their peers at 10. What a packet costs is seen by a machine that answers through its firewall: the first packet of a flow
(`flow_us`) and a later one (`packet_us`), there and back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hostagent.drivers.network.firewall import Firewalls
from hostagent.drivers.network.nft import NftHelper
from hostagent.drivers.network.protocol import RulePart
from hostagent.drivers.network.ruleset import Ruleset
from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import Generation, NicWanted
from tests import namespaces
from tests.conformance.netns import Machine, make_machine

ONE = Generation(epoch=1, number=1)
POLICY = PolicyWanted(
    id="policy",
    generation=ONE,
    infrastructure_cidrs=("192.0.2.0/24", "2001:db8::/64"),
    private_cidrs=("10.0.0.0/8", "fd00::/8"),
    is_enforced=True,
)
EXTRA = FirewallRuleWanted(
    direction="ingress", action="allow", protocol="tcp", cidrs=("198.51.100.0/24",), port_first=7, port_last=7
)
Change = Callable[[int], Mapping[str, RulePart | None]]


def nic(number: int) -> NicWanted:
    high, low = number >> 8, number & 255
    return NicWanted(
        id=f"nic_{number:012}",
        generation=ONE,
        mac=f"06:00:00:01:{high:02x}:{low:02x}",
        ipv4=f"10.94.{high}.{low}",
        ipv6=f"fd94::{number:x}",
    )


def firewall(number: int, *more: FirewallRuleWanted, member: NicWanted | None = None) -> FirewallWanted:
    """Ten rules of both families, on one machine."""
    on = member or nic(number)
    rules = tuple(
        FirewallRuleWanted(
            direction="ingress",
            action="allow",
            protocol="tcp" if port % 2 else "udp",
            cidrs=(f"10.{port}.0.0/16", "10.93.0.0/24", f"fd00:{port:x}::/32"),
            port_first=1000 + port * 10,
            port_last=1005 + port * 10,
        )
        for port in range(9)
    )
    icmp = FirewallRuleWanted(direction="ingress", action="allow", protocol="icmp", cidrs=("0.0.0.0/0", "::/0"))
    members = (FirewallMemberWanted(nic_id=on.id, ipv4=on.ipv4, ipv6=on.ipv6),)
    return FirewallWanted(id=f"fw_{number:012}", generation=ONE, rules=(*rules, icmp, *more), members=members)


class Host:
    """A table with `count` firewalls, each on a machine of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.firewalls = Firewalls()
        self.rules = Ruleset(NftHelper())

    async def start(self) -> float:
        """Seconds that writing everything took."""
        for number in range(1, self.count + 1):
            self.firewalls.set_nic(nic(number))
            self.firewalls.set_firewall(firewall(number), f"fw_{number:012}")
        self.firewalls.set_policy(POLICY)
        before = time.perf_counter()
        await self.rules.start(self.firewalls.parts())
        return time.perf_counter() - before

    def set(self, number: int, *more: FirewallRuleWanted) -> Mapping[str, RulePart | None]:
        return self.firewalls.set_firewall(firewall(number, *more), f"fw_{number:012}").parts

    async def timed(self, change: Change, turns: int) -> float:
        """Median milliseconds."""
        found = []
        for turn in range(turns):
            before = time.perf_counter()
            await self.rules.put(change(turn))
            found.append((time.perf_counter() - before) * 1000)
        return statistics.median(found)

    async def turns(self, count: int) -> dict[str, float]:
        """One more, and one less, of each kind."""
        last = self.count
        found = {
            "vm_added": await self.timed(lambda turn: self.firewalls.set_nic(nic(last + 1 + turn)), count),
            "rule_added": await self.timed(lambda turn: self.set(1 + turn % last, EXTRA), count),
            "rule_removed": await self.timed(lambda turn: self.set(1 + turn % last), count),
            "firewall_added": await self.timed(lambda turn: self.set(last + 1 + turn), max(3, count // 5)),
        }
        gone = [f"fw_{last + 1 + turn:012}" for turn in range(max(3, count // 5))]
        found["firewall_removed"] = await self.timed(
            lambda turn: self.firewalls.set_firewall(None, gone[turn]).parts, len(gone)
        )
        found["vm_removed"] = await self.timed(lambda turn: self.firewalls.drop_nic(nic(last + 1 + turn).id), count)
        return found

    async def packets(self, one: Machine, other: Machine, count: int) -> dict[str, float]:
        """Median microseconds of a datagram there and its answer back."""
        changed: dict[str, RulePart | None] = {}
        for machine in (one, other):
            changed |= self.firewalls.set_nic(machine.nic)
        changed |= self.firewalls.set_firewall(firewall(9_999, member=other.nic), "fw_000000009999").parts
        await self.rules.put(changed)
        server = other.bound(4, 1002)
        found: dict[str, list[float]] = {"flow_us": [], "packet_us": []}
        for port in range(20_000, 20_000 + count):
            client = one.bound(4, port)
            for name in ("flow_us", "packet_us"):
                before = time.perf_counter()
                client.sendto(b"?", (other.ipv4, 1002))
                _, back = server.recvfrom(16)
                server.sendto(b"!", back)
                client.recv(16)
                found[name].append((time.perf_counter() - before) * 1e6)
            client.close()
        server.close()
        return {name: statistics.median(values) for name, values in found.items()}


async def measure(*, is_quick: bool) -> list[dict[str, Any]]:
    turns, packets = (5, 50) if is_quick else (51, 1000)
    one, other = await make_machine(2), await make_machine(3)
    figures: dict[int, dict[str, float]] = {}
    try:
        for count in (10, 1000):
            host = Host(count)
            loaded = await host.start()
            try:
                figures[count] = {"load_seconds": loaded, **await host.turns(turns), **await host.packets(one, other, packets)}
                await host.rules.put({"bench": RulePart(objects={"counter bench": ""})})  # nothing before needed the helper
                pid = host.rules.driver.pid if isinstance(host.rules.driver, NftHelper) else None
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) if pid else 0
                figures[count]["helper_mib"] = pages * os.sysconf("SC_PAGESIZE") / 2**20
            finally:
                await host.rules.driver.remove()
                await host.rules.close()
    finally:
        one.close()
        other.close()
    units = {"load_seconds": "s", "helper_mib": "MiB", "flow_us": "µs", "packet_us": "µs"}
    return [
        {
            "metric": name if name in units else f"{name}_1000th_p50_ms",
            "ours": round(value, 3),
            "unit": units.get(name, "ms"),
            "peer": "the same with 10",
            "peer_value": round(figures[10][name], 3),
            "ratio": round(value / figures[10][name], 3) if figures[10][name] else 0.0,
        }
        for name, value in figures[1000].items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean little")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with namespaces.own():
        rows = asyncio.run(measure(is_quick=options.quick))
    report = {
        "name": "firewalls",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, load {load:.2f}",
        "command": "python -m tests.bench.firewalls" + (" --quick" if options.quick else ""),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(report, ensure_ascii=False))
        return
    print(f"{report['date']}, {report['machine']}, `{report['command']}`:\n")
    print("| metric | ours | unit | peer | peer's | ratio |\n|---|---:|---|---|---:|---:|")
    for row in rows:
        print(f"| {row['metric']} | {row['ours']} | {row['unit']} | {row['peer']} | {row['peer_value']} | {row['ratio']} |")


if __name__ == "__main__":
    main()
