"""What no machine may do whatever its firewalls say: forge, reach the host; and what the host does for all of them."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess

import pytest

from hostagent.drivers.network.protocol import HOST_IPV4, HOST_IPV6
from hostagent.verbs import firewall, rules
from tests.conformance.netns import arp, frame, icmp6, udp
from tests.conformance.world import ANYWHERE, exchange, hears, rule, settled

pytestmark = pytest.mark.caps("root", "netns", "nft")
VERSIONS = pytest.mark.parametrize("version", [4, 6])


@VERSIONS
async def test_forged_senders_are_dropped_and_counted(world, version):
    liar, victim, receiver = [await world.machine(number) for number in (2, 3, 4)]
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "any"), on=(receiver,))
    heard, frames = receiver.bound(version, 4001), liar.frames()
    there, mine, others = (place.address(version) for place in (receiver, liar, victim))

    frames.send(frame(liar.nic.mac, *udp(mine, there, 4001)))
    assert hears(heard, seconds=5) == b"spoofed!"
    frames.send(frame(liar.nic.mac, *udp(others, there, 4001)))
    frames.send(frame(liar.nic.mac, *udp("192.0.2.9" if version == 4 else "2001:db8::9", there, 4001)))
    frames.send(frame(victim.nic.mac, *udp(mine, there, 4001)))
    frames.send(frame(victim.nic.mac, *udp(others, there, 4001)))
    assert hears(heard) is None
    assert await world.count(f"spoofed_ipv{version}") == 2
    assert await world.count("spoofed_mac") == 2


async def test_forged_arp_and_nd_are_dropped_and_counted(world):
    liar, victim = await world.machine(2), await world.machine(3)
    await world.policy()
    frames, mac = liar.frames(), liar.nic.mac
    solicit = struct.pack("!BBHI", 135, 0, 0, 0) + socket.inet_pton(socket.AF_INET6, HOST_IPV6) + b"\x01\x01" + bytes(6)
    advert = struct.pack("!BBHI", 136, 0, 0, 0x2000_0000) + socket.inet_pton(socket.AF_INET6, victim.ipv6)
    forged = (
        arp(1, mac, victim.ipv4, HOST_IPV4),
        arp(2, mac, HOST_IPV4, victim.ipv4),
        arp(1, victim.nic.mac, liar.ipv4, HOST_IPV4),
    )
    for kind, packet in forged:
        frames.send(frame(mac, kind, packet))
    for source, body in ((victim.ipv6, solicit), (HOST_IPV6, solicit), (liar.ipv6, advert)):
        frames.send(frame(mac, *icmp6(source, HOST_IPV6, body)))

    await settled(lambda: world.count("spoofed_nd"), 1)
    assert await world.count("a_spoofed_arp") == 3
    assert await world.count("spoofed_ipv6") == 2
    assert victim.pings(world.outside.ipv6)
    assert liar.pings(world.outside.ipv4)


async def test_link_local_addresses_are_few(world):
    """Each would be a neighbour of the host, and the kernel's table of neighbours is one for all."""
    machine = await world.machine(2)
    await world.policy()
    frames = machine.frames()
    body = struct.pack("!BBHI", 135, 0, 0, 0) + socket.inet_pton(socket.AF_INET6, HOST_IPV6)
    for number in range(0x100, 0x110):
        frames.send(frame(machine.nic.mac, *icmp6(f"fe80::{number:x}", HOST_IPV6, body)))
    await settled(lambda: world.count("spoofed_ipv6"), 12, at_least=True)
    frames.send(frame(machine.nic.mac, *icmp6("::", "ff02::1:ff00:2", body)))
    assert await world.count("spoofed_ipv6") <= 13
    assert machine.pings(world.outside.ipv6)


@VERSIONS
async def test_a_machine_reaches_no_service_of_the_host_nor_infrastructure(world, version):
    machine, neighbour = await world.machine(2), await world.machine(3)
    world.host.listen(version, 22)
    world.outside.listen(version, 80)
    gateway = HOST_IPV4 if version == 4 else world.host.ipv6
    assert machine.connects(gateway, 22)
    hidden = "192.0.2.70" if version == 4 else "2001:db8::1:70"
    assert world.outside.netns is not None
    world.outside.netns.run(
        "ip", "address", "add", f"{hidden}/{24 if version == 4 else 64}", "dev", "up0p", *([] if version == 4 else ["nodad"])
    )
    await world.policy()

    for address in (HOST_IPV4, world.host.ipv4) if version == 4 else (world.host.ipv6,):
        assert machine.connects(address, 22) is None
        assert not machine.pings(address, seconds=0.3)
    assert await world.count("to_host") >= 2
    assert machine.connects(world.outside.address(version), 80)
    before = await world.count("to_infrastructure")
    assert machine.connects(hidden, 80) is None
    assert await world.count("to_infrastructure") > before
    if version == 4:
        assert machine.connects("169.254.169.254", 80) is None
    assert world.host.connects(neighbour.address(version), 80) is None  # nobody listens there, but the way is open
    neighbour.listen(version, 81)
    assert world.host.connects(neighbour.address(version), 81)


@VERSIONS
async def test_flows_that_a_machine_opened_before_the_policy_do_not_outlive_it(world, version):
    machine = await world.machine(2)
    listener = world.host.listen(version, 22)
    client = machine.connects(world.host.address(version), 22)
    accepted = exchange(world.host, listener, client)
    await world.policy()

    client.sendall(b"?")
    assert hears(accepted) is None


@VERSIONS
async def test_private_addresses_leave_masqueraded(world, version):
    machine, neighbour = await world.machine(2), await world.machine(3)
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "any"), on=(neighbour,))
    for place, seen in ((world.outside, world.host), (neighbour, machine)):
        listener = place.listen(version, 80)
        assert machine.connects(place.address(version), 80)
        accepted, peer = listener.accept()
        place.sockets.append(accepted)
        assert peer[0] == seen.address(version)


@VERSIONS
async def test_large_packets_find_their_size(world, version):
    """A narrow link behind the host: what is too big comes back as an error, streams never send it."""
    machine, narrow = await world.machine(2), await world.machine(3, mtu_bytes=1300)
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "any"), on=(machine, narrow))
    address = narrow.address(version)

    assert machine.pings(address, size=1200)
    assert not machine.pings(address, size=1400)
    assert machine.netns is not None
    learned = machine.netns.run("ip", f"-{version}", "route", "get", address).stdout.decode()
    assert "mtu 1300" in learned
    listener = narrow.listen(version, 80)
    client = machine.connects(address, 80, seconds=5)
    accepted = exchange(narrow, listener, client)
    client.sendall(bytes(100_000))
    received = 0
    while received < 100_000:
        received += len(accepted.recv(65_536))
    assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 1300 - (40 if version == 4 else 60)


@pytest.mark.parametrize("words", [("flush", "ruleset"), ("flush", "chain", "inet", "bedplate", "machine_in")], ids=" ".join)
async def test_what_somebody_flushes_is_back_at_once_and_told(world, words):
    server, client = await world.machine(2), await world.machine(3)
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "tcp", ANYWHERE, (80, 80)), on=(server,))
    for port in (80, 81):
        server.listen(4, port)
    guard = asyncio.create_task(rules.guard(world.agent))
    await asyncio.sleep(0)
    try:
        cursor = world.agent.events.cursor
        subprocess.run(["nft", *words], check=True, timeout=10)
        async with asyncio.timeout(10):
            while [event.event for event in world.agent.events.since(cursor)][-1:] != ["rules.repaired"]:
                await world.agent.events.wait(world.agent.events.cursor)
        told = world.agent.events.since(cursor)
    finally:
        guard.cancel()
        await asyncio.wait({guard})

    assert (told[0].event, told[0].body) == ("rules.disturbed", {"by": "nft"})
    assert client.connects(server.ipv4, 80)
    assert client.connects(server.ipv4, 81) is None


async def test_an_address_that_is_given_away_has_no_old_flows(world):
    server, client = await world.machine(2), await world.machine(3)
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "tcp"), on=(server,))
    exchange(server, server.listen(4, 80), client.connects(server.ipv4, 80))
    assert await world.agent.drivers.flows.flows(addresses=[server.ipv4])

    await firewall.dismiss(world.agent, (server.nic.id,))
    assert await world.agent.drivers.flows.flows(addresses=[server.ipv4]) == []
    assert client.connects(server.ipv4, 80) is None
