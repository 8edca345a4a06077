"""Firewalls, anti-spoofing and the host's policy by packets: verbs on real links, rules and flows, machines as namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import re
import socket
import struct
import subprocess
from collections.abc import AsyncIterator

import pytest

from hostagent.drivers.network.conntrack import Conntrack
from hostagent.drivers.network.nft import NftHelper
from hostagent.drivers.network.protocol import HOST_IPV4, HOST_IPV6
from hostagent.drivers.registry import fake_drivers
from hostagent.lib.hostconfig import HostConfig
from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import Generation, Purge
from hostagent.verbs import firewall, rules
from hostagent.verbs.context import Agent, open_agent
from tests.conformance.netns import Machine, Place, arp, frame, icmp6, make_machine, make_outside, udp

pytestmark = [pytest.mark.caps("root", "netns", "nft"), pytest.mark.usefixtures("own_network")]
VERSIONS = pytest.mark.parametrize("version", [4, 6])
ANYWHERE = ("0.0.0.0/0", "::/0")
INFRASTRUCTURE = ("192.0.2.64/26", "2001:db8::1:0/112")
PRIVATE = ("10.0.0.0/8", "fd00::/8")
numbers = itertools.count(1)


class World:
    """One host with its agent, machines and an outside."""

    def __init__(self, agent: Agent, host: Place, outside: Place) -> None:
        self.agent = agent
        self.host = host
        self.outside = outside
        self.machines: list[Machine] = []

    async def machine(self, number: int, *, mtu_bytes: int = 1500) -> Machine:
        made = await make_machine(number, mtu_bytes=mtu_bytes)
        self.machines.append(made)
        await firewall.admit(self.agent, (made.nic,))
        return made

    async def policy(self, *, infrastructure: tuple[str, ...] = INFRASTRUCTURE) -> None:
        wanted = PolicyWanted(
            id="policy",
            generation=Generation(epoch=1, number=next(numbers)),
            infrastructure_cidrs=infrastructure,
            private_cidrs=PRIVATE,
            is_enforced=True,
        )
        assert isinstance((await firewall.ensure_policy(self.agent, wanted)).result, Succeeded)

    async def firewall(self, name: str, *chosen: FirewallRuleWanted, on: tuple[Machine, ...]) -> int:
        """How many flows that ended."""
        members = tuple(FirewallMemberWanted(nic_id=m.nic.id, ipv4=m.ipv4, ipv6=m.ipv6) for m in on)
        generation = Generation(epoch=1, number=next(numbers))
        document = FirewallWanted(id=name, generation=generation, rules=chosen, members=members)
        result = (await firewall.ensure(self.agent, document)).result
        assert isinstance(result, Succeeded), result
        return result.observed["flows_ended"]

    async def count(self, name: str) -> int:
        family = "arp" if name.startswith("a_") else "inet"
        listed = await self.agent.drivers.rules.read(f"list counter {family} bedplate {name}")
        found = re.search(r"packets (\d+)", listed)
        assert found is not None
        return int(found[1])


@pytest.fixture
async def world(paths) -> AsyncIterator[World]:
    drivers = dataclasses.replace(fake_drivers(), rules=NftHelper(), flows=Conntrack())
    agent = await open_agent(paths, HostConfig(), drivers, version="test")
    agent.settle_seconds = 20.0
    await rules.start(agent)
    made = World(agent, *make_outside())
    try:
        yield made
    finally:
        for place in (*made.machines, made.outside, made.host):
            place.close()
        await agent.jobs.close()
        await agent.rules.close()
        drivers.flows.close()


def rule(direction: str, action: str, protocol: str, cidrs: tuple[str, ...] = ANYWHERE, ports: tuple[int, int] = (0, 0)):
    return FirewallRuleWanted(
        direction=direction, action=action, protocol=protocol, cidrs=cidrs, port_first=ports[0], port_last=ports[1]
    )


def only(*places: Place) -> tuple[str, ...]:
    return tuple(f"{address}/{bits}" for place in places for address, bits in ((place.ipv4, 32), (place.ipv6, 128)))


def hears(receiver: socket.socket, *, seconds: float = 0.3) -> bytes | None:
    receiver.settimeout(seconds)
    with contextlib.suppress(TimeoutError):
        return receiver.recv(65_536)
    return None


def exchange(place: Place, listener: socket.socket, client: socket.socket) -> socket.socket:
    """The server's side of a connection over which a byte went both ways."""
    accepted, _ = listener.accept()
    place.sockets.append(accepted)
    accepted.settimeout(5)
    client.sendall(b"?")
    assert accepted.recv(1) == b"?"
    accepted.sendall(b"!")
    assert client.recv(1) == b"!"
    return accepted


@VERSIONS
async def test_without_a_policy_nothing_is_filtered_and_with_one_all_inward_is(world, version):
    one, two = await world.machine(2), await world.machine(3)
    one.listen(version, 80)
    assert two.connects(one.address(version), 80)
    await world.policy()

    assert two.connects(one.address(version), 80) is None
    assert not two.pings(one.address(version), seconds=0.3)
    assert await world.count("denied_in") >= 2
    await firewall.purge_policy(world.agent, Purge(id="policy", generation=Generation(epoch=9, number=1)))
    assert two.connects(one.address(version), 80)


@VERSIONS
async def test_rules_let_in_what_they_say_and_nothing_else(world, version):
    server, friend, stranger = [await world.machine(number) for number in (2, 3, 4)]
    await world.policy()
    await world.firewall(
        "fw_1",
        rule("ingress", "allow", "tcp", only(friend), (80, 90)),
        rule("ingress", "allow", "udp", only(friend), (53, 53)),
        rule("ingress", "allow", "icmp", only(friend)),
        on=(server,),
    )
    address = server.address(version)
    for port in (79, 80, 90, 91):
        server.listen(version, port)
    heard = server.bound(version, 53)

    assert [bool(friend.connects(address, port)) for port in (79, 80, 90, 91)] == [False, True, True, False]
    assert stranger.connects(address, 80) is None
    for sender, words in ((stranger, b"no"), (friend, b"yes")):
        sender.bound(version, 5000).sendto(words, (address, 53))
    assert hears(heard, seconds=5) == b"yes"
    heard.sendto(b"answer", (friend.address(version), 5000))
    assert hears(friend.sockets[-1], seconds=5) == b"answer"
    assert friend.pings(address)
    assert not stranger.pings(address, seconds=0.3)


@VERSIONS
async def test_what_goes_out_is_free_until_something_restricts_it(world, version):
    machine = await world.machine(2)
    await world.policy()
    for port in (80, 81, 82):
        world.outside.listen(version, port)
    there = world.outside.address(version)
    assert machine.connects(there, 80)

    await world.firewall("fw_1", rule("egress", "deny", "tcp", ANYWHERE, (81, 81)), on=(machine,))
    assert [bool(machine.connects(there, port)) for port in (80, 81, 82)] == [True, False, True]
    await world.firewall("fw_2", rule("egress", "allow", "tcp", ANYWHERE, (81, 82)), on=(machine,))
    assert [bool(machine.connects(there, port)) for port in (80, 81, 82)] == [False, False, True]
    assert not machine.pings(there, seconds=0.3)


@VERSIONS
async def test_a_deny_of_one_firewall_wins_over_an_allow_of_another(world, version):
    server, client, other = [await world.machine(number) for number in (2, 3, 4)]
    await world.policy()
    server.listen(version, 80)
    await world.firewall("fw_allow", rule("ingress", "allow", "tcp", ANYWHERE, (1, 65535)), on=(server,))
    assert client.connects(server.address(version), 80)
    await world.firewall("fw_deny", rule("ingress", "deny", "any", only(client)), on=(server, other))

    assert client.connects(server.address(version), 80) is None
    assert other.connects(server.address(version), 80)
    await world.firewall("fw_deny", on=(other,))
    assert client.connects(server.address(version), 80)


@VERSIONS
async def test_a_revoked_rule_ends_the_connection_that_it_let_in(world, version):
    server, client = await world.machine(2), await world.machine(3)
    await world.policy()
    listener = server.listen(version, 80)
    kept = server.listen(version, 81)
    both = (rule("ingress", "allow", "tcp", ANYWHERE, (80, 81)), rule("ingress", "allow", "udp"))
    await world.firewall("fw_1", *both, on=(server,))
    ended = client.connects(server.address(version), 80)
    accepted = exchange(server, listener, ended)
    living = client.connects(server.address(version), 81)
    survivor = exchange(server, kept, living)

    assert await world.firewall("fw_1", rule("ingress", "allow", "tcp", ANYWHERE, (81, 81)), on=(server,)) == 1
    accepted.sendall(b"go on")  # the machine speaks first, and is reset
    with pytest.raises(ConnectionResetError):
        accepted.recv(1)
    assert hears(ended) is None
    living.sendall(b"?")
    assert survivor.recv(1) == b"?"


@VERSIONS
async def test_a_revoked_rule_ends_datagrams_in_both_directions(world, version):
    server, client = await world.machine(2), await world.machine(3)
    await world.policy()
    await world.firewall("fw_1", rule("ingress", "allow", "udp", ANYWHERE, (53, 53)), on=(server,))
    at_server, at_client = server.bound(version, 53), client.bound(version, 5000)
    at_client.connect((server.address(version), 53))
    at_client.send(b"1")
    assert at_server.recvfrom(10)[0] == b"1"
    at_server.sendto(b"2", (client.address(version), 5000))
    assert at_client.recv(10) == b"2"

    assert await world.firewall("fw_1", on=(server,)) == 1
    at_server.sendto(b"3", (client.address(version), 5000))
    with contextlib.suppress(OSError):
        assert hears(at_client) is None
    with contextlib.suppress(OSError):
        at_client.send(b"4")
    with contextlib.suppress(OSError):
        assert hears(at_server) is None
    at_server.sendto(b"5", (client.address(version), 6000))  # another flow is free to go out


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


async def settled(counted, value: int, *, at_least: bool = False) -> None:
    """Frames are taken by the kernel in its own time."""
    async with asyncio.timeout(5):
        while (seen := await counted()) != value and not (at_least and seen >= value):
            await asyncio.sleep(0.01)
