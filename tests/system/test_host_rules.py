"""A lab host's rules hold through whatever happens to it: helper and agent killed, table flushed, reboot. Seen by packets."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.wanted import Generation, NicWanted
from provisioning.lab import Lab
from tests.system.agenthost import AgentHost

pytestmark = [pytest.mark.lab, pytest.mark.timeout(180), pytest.mark.caps("root", "netns", "sshd", "nft")]
ONE = Generation(epoch=1, number=1)
NIC = NicWanted(id="nic_01hf7yat00000000000000r1", generation=ONE, mac="06:00:00:00:92:05", ipv4="10.92.0.5", ipv6="fd92::5")
REPAIR_SECONDS = 20.0


def firewall(number: int, *protocols: str) -> FirewallWanted:
    rules = tuple(
        FirewallRuleWanted(direction="ingress", action="allow", protocol=protocol, cidrs=("0.0.0.0/0", "::/0"))
        for protocol in protocols
    )
    members = (FirewallMemberWanted(nic_id=NIC.id, ipv4=NIC.ipv4, ipv6=NIC.ipv6),)
    return FirewallWanted(id="fw_1", generation=Generation(epoch=1, number=number), rules=rules, members=members)


async def dropped(host: AgentHost, reason: str = "denied_in") -> int:
    """Packets, by the agent's metrics."""
    reader, writer = await asyncio.open_unix_connection(host.host.root / "run/bedplate/metrics.sock")
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(10):
        text = (await reader.read()).decode()
    writer.close()
    found = re.search(rf'dropped_packets_total{{reason="{reason}"}} (\d+)', text)
    return int(found[1]) if found else -1


async def is_filtered(host: AgentHost, sender: AgentHost) -> bool:
    """Whether the host counts a ping from outside as dropped. Nobody is behind the link, so nobody answers either way."""
    before = await dropped(host)
    ping = ["ping", "-n", "-q", "-c1", "-W0.2", NIC.ipv4]
    await asyncio.to_thread(lambda: sender.host.exec(ping, check=False))
    return before >= 0 and await dropped(host) > before


async def until(is_true: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + REPAIR_SECONDS
    while not await is_true():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


def process_of(host: AgentHost, face: bytes) -> int:
    """The pid of the agent's process with this face, in the host's pid namespace of ours."""
    namespace = os.stat(f"/proc/{host.host.pid}/ns/net").st_ino  # noqa: PTH116 - of a link that is no path
    for entry in Path("/proc").iterdir():
        try:
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            if face in argv[:5] and os.stat(entry / "ns/net").st_ino == namespace:  # noqa: PTH116
                return int(entry.name)
        except (OSError, ValueError):
            continue
    raise AssertionError(f"no process {face!r}")


async def test_rules_hold_through_whatever_happens(lab: Lab) -> None:
    host, sender = AgentHost(lab.host("a")), AgentHost(lab.host("b"))
    host.install()
    await host.ready()
    sender.host.exec(["ip", "route", "replace", f"{NIC.ipv4}/32", "via", lab.host("a").record.address])
    await host.ensure("nic", NIC)
    await host.ensure("firewall", firewall(1, "tcp"))
    assert not await is_filtered(host, sender)
    policy = PolicyWanted(id="policy", generation=ONE, private_cidrs=("10.0.0.0/8",), is_enforced=True)
    await host.ensure("policy", policy)
    assert await is_filtered(host, sender)

    os.kill(process_of(host, b"rules-helper"), signal.SIGKILL)
    await host.ensure("firewall", firewall(2, "tcp", "icmp"))
    assert not await is_filtered(host, sender)
    await host.ensure("firewall", firewall(3, "tcp"))

    host.host.exec(["nft", "flush", "ruleset"])
    await until(lambda: is_filtered(host, sender))

    agent = process_of(host, b"serve")
    os.kill(agent, signal.SIGKILL)
    await host.ready()
    assert process_of(host, b"serve") != agent
    assert await is_filtered(host, sender)

    await asyncio.to_thread(host.host.reboot)
    await host.ready()
    await until(lambda: is_filtered(host, sender))
    await host.ensure("firewall", firewall(4, "icmp"))
    assert not await is_filtered(host, sender)
    await host.purge("policy", "policy", Generation(epoch=1, number=2))
    await host.purge("firewall", "fw_1", Generation(epoch=1, number=9))
    assert host.host.exec(["nft", "list", "tables"]).stdout == b""
