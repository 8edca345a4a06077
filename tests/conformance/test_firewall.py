"""Firewalls by packets: what rules let in and out, and what they end."""

from __future__ import annotations

import contextlib

import pytest

from hostagent.protocol.wanted import Generation, Purge
from hostagent.verbs import firewall
from tests.conformance.world import ANYWHERE, exchange, hears, only, rule

pytestmark = pytest.mark.caps("root", "netns", "nft")
VERSIONS = pytest.mark.parametrize("version", [4, 6])


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
