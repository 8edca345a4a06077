"""Firewalls, reserved addresses and load balancers through the API, met by packets from outside of the hosts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from controlplane.embedded import showcase
from controlplane.embedded.stage import HOSTS
from tests.system.deployment import MIB, VMS, Deployed, Json, deploy
from tests.system.outside import Requests, answer, connects, pings, requests, until

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.caps("root", "netns", "sshd", "qemu", "qsd", "debootstrap"),
    pytest.mark.asyncio(loop_scope="module"),
]
PROJECT = f"/v1/projects/{showcase.PROJECT}"
BALANCER = f"{PROJECT}/loadbalancers/front"
PORT = 2222


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed() -> AsyncIterator[Deployed]:
    """Both lab hosts are edges."""
    async with deploy() as made:
        yield made


async def test_from_outside_in_every_way(deployed: Deployed) -> None:
    """Long, because it is one story: a machine that takes long to boot is used for all of it."""
    vips = await _vips(deployed)
    vm = await _machine_beside_the_holder(deployed, vips)
    await _sizes(deployed, vm)
    await _rule_revoked_under_a_flow(deployed, vm)
    await _edge_died(deployed, vips)
    await _address_moved(deployed, vips[0])
    await _machine_deleted_under_an_address(deployed, vips[0])


async def _vips(deployed: Deployed) -> list[str]:
    """Of both families, on a load balancer that nobody is behind yet: it refuses at once."""
    api, record = deployed.stage.api, deployed.lab.record
    *_, ipv4, _ = record.network_ipv4.subnets(new_prefix=28)
    ipv6 = f"{record.network_ipv6[0xF00]}/120"
    vips: list[str] = []
    for name, cidr in (("front", str(ipv4)), ("front6", ipv6)):
        await api.post("/v1/pools", {"name": name, "cidr": cidr, "announce": "arp"})
        vips.append((await api.post(f"{PROJECT}/addresses", {"name": name, "pool": name}))["address"])
    body = {
        "name": "front",
        "addresses": ["front", "front6"],
        "listeners": [{"port": PORT, "target_port": 22}],
        "probe": {"kind": "tcp", "interval_ms": 1000, "timeout_ms": 1000},
    }
    await api.post(f"{PROJECT}/loadbalancers", body)
    await api.until(f"{PROJECT}/addresses/front", lambda seen: len(seen["held_by"]) == len(seen["standby"]) == 1, seconds=60)
    for vip in vips:
        await until(lambda vip=vip: _is(vip, "refused"), f"{vip} refuses", 20)
    return vips


async def _is(vip: str, expected: str) -> bool:
    return await answer(vip, PORT, 0.5) == expected


async def _holder(deployed: Deployed) -> str:
    (holder,) = (await deployed.stage.api.get(f"{PROJECT}/addresses/front"))["held_by"]
    return holder


async def _machine_beside_the_holder(deployed: Deployed, vips: list[str]) -> Json:
    """On the host that stands by, so that it outlives the holder."""
    holder = await _holder(deployed)
    other = next(name for name in HOSTS if name != holder)
    await deployed.create("one", memory_bytes=320 * MIB, placement={"host": other})
    vm = await deployed.until("one", "running")
    await deployed.stage.api.post(f"{BALANCER}/backends", {"vm": "one"})
    await deployed.stage.api.until(BALANCER, lambda seen: seen["status"] == "up", seconds=120)
    for vip in vips:
        await until(lambda vip=vip: _is(vip, "taken"), f"{vip} leads to the machine", 20)
    return vm


async def _sizes(deployed: Deployed, vm: Json) -> None:
    """Through the tunnel between hosts: small and large payloads arrive; what may not be cut is told its size."""
    other = deployed.other(vm)
    for address in (vm["ipv4"], vm["ipv6"]):
        for size in ("1400", "9000"):
            arrives = partial(_arrives, deployed, other.name, size, address)
            await until(arrives, f"{size} bytes to {address} and back", 20)
    said = (await _ping(deployed, other.name, "-c1", "-M", "do", "-s", "1400", vm["ipv4"])).decode()
    assert re.search(r"mtu[ =]*\d{4}", said), said


async def _arrives(deployed: Deployed, host: str, size: str, address: str) -> bool:
    """One echo; a busy machine's guest loses some."""
    said = (await _ping(deployed, host, "-c1", "-W2", "-s", size, address)).decode()
    return " 1 received" in said


async def _ping(deployed: Deployed, host: str, *arguments: str) -> bytes:
    argv = ["ping", "-n", *arguments]
    done = await asyncio.to_thread(deployed.lab.host(host).exec, argv, check=False, timeout=30)
    return done.stdout + done.stderr


async def _rule_revoked_under_a_flow(deployed: Deployed, vm: Json) -> None:
    api, firewall = deployed.stage.api, f"{PROJECT}/firewalls/default"
    rule = next(rule for rule in (await api.get(firewall))["rules"] if rule["protocol"] == "icmp")
    async with pings(vm["ipv4"], *deployed.other(vm).exec_argv([]), seconds=8) as flow:
        await until(flow.flows, "the flow is let in", 7)
        asked = time.time()
        await api.post(f"{firewall}/revoke", {"rule": rule["id"]})
        await asyncio.sleep(3)
    print(f"revoked_to_last_answer: {max(flow.answered) - asked:.2f} s")
    assert max(flow.answered) - asked < 2
    await api.post(f"{firewall}/allow", {"protocol": "icmp", "cidrs": ["0.0.0.0/0", "::/0"]})


async def _edge_died(deployed: Deployed, vips: list[str]) -> None:
    """First its agent alone, which nobody may notice; then the host, which the one that stands by makes good."""
    api = deployed.stage.api
    holder = await _holder(deployed)
    host = deployed.lab.host(holder)
    async with requests(vips[0], PORT) as client, requests(vips[1], PORT) as client6, pings(vips[0], seconds=600) as kernel:
        began = time.monotonic()
        await asyncio.to_thread(host.exec, ["pkill", "-9", "-f", "agent.*serve"])
        await asyncio.sleep(2)
        print(f"agent_killed: longest gap {client.longest_gap(began):.2f} s")
        assert client.longest_gap(began) < 2, "one lost packet costs a second"
        began = time.monotonic()
        await asyncio.to_thread(host.stop)
        await until(lambda: _answered_since(client6, began + 1), "another edge answers", 30)
        await until(lambda: _answered_since(client, began + 1), "another edge answers", 30)
        print(f"edge_died: longest gap {client.longest_gap(began):.1f} s, IPv6 {client6.longest_gap(began):.1f} s")
        assert max(client.longest_gap(began), client6.longest_gap(began)) < 5, "a second on an idle machine"
        await api.until(f"{PROJECT}/addresses/front", lambda seen: seen["held_by"] not in ([], [holder]), seconds=60)
        began = time.monotonic()
        await asyncio.to_thread(host.start)
        await api.until(f"{PROJECT}/addresses/front", lambda seen: seen["standby"] == [holder], seconds=60)
        print(f"edge_back: stands by after {time.monotonic() - began:.1f} s, longest gap {client.longest_gap(began):.2f} s")
        print(f"edges_kernels: longest gap {kernel.longest_gap():.2f} s")
        assert client.longest_gap(began) < 8, "a busy machine is slow to answer"
        assert kernel.longest_gap() < 3, "the hosts' own kernels are not"
    assert await _holder(deployed) != holder


async def _answered_since(client: Requests, moment: float) -> bool:
    return any(at > moment for at in client.answered)


async def _address_moved(deployed: Deployed, vip: str) -> None:
    """To a machine, to the load balancer and to the machine again, in a moment each."""
    api, path = deployed.stage.api, f"{PROJECT}/addresses/front"
    for body, port in (({"vm": "one"}, 22), ({"loadbalancer": "front"}, PORT), ({"vm": "one"}, 22)):
        began = time.monotonic()
        await api.post(f"{path}/attach", {**body, "move": True})
        await until(lambda port=port: connects(vip, port, 0.3), f"{vip} leads to {body}", 10)
        took = time.monotonic() - began
        print(f"moved_to_{next(iter(body))}: {took:.2f} s")
        assert took < 5, "below a second on an idle machine"


async def _machine_deleted_under_an_address(deployed: Deployed, vip: str) -> None:
    api, path = deployed.stage.api, f"{PROJECT}/addresses/front"
    await deployed.delete("one")
    kept = await api.get(path)
    assert (kept["address"], kept["target"], kept["held_by"]) == (vip, None, [])
    assert not await api.call("GET", f"{VMS}/one", missing_ok=True)
    assert (await api.get(BALANCER))["status"] == "down", "nobody is behind it"
