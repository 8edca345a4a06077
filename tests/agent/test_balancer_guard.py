"""What stands before the choice of a backend (limits, time-outs) and what is learnt after it (probes, circuits, counts)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections import Counter

import pytest

from hostagent.drivers.network.balancer_health import HELD
from hostagent.lib.wait import until
from hostagent.protocol.network import CircuitWanted, ProbeWanted
from tests.agent.balancing import NAMES, VIP4, VIP6, broken, ip, sysctl
from tests.conformance.netns import checksum

pytestmark = pytest.mark.caps("root", "netns", "nft")
BOTH = pytest.mark.parametrize("vip", [VIP4, VIP6])
PROBE = ProbeWanted(kind="tcp", interval_ms=100, timeout_ms=200, rise=2, fall=2)


async def flood(edge, vip, source, count):
    """Handshakes that began and were answered within a moment; the others are dropped without an answer."""
    loop = asyncio.get_running_loop()
    flows = []
    for _ in range(count):
        flow = edge.stage.client.socket(vip, socket.SOCK_STREAM)
        flow.bind((source, 0))
        flow.connect_ex((vip, 443))
        flows.append(flow)
    end = loop.time() + 0.5  # before the kernel sends a SYN again
    while loop.time() < end:
        await asyncio.sleep(0.02)
    answered = sum(1 for flow in flows if flow.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 and _is_connected(flow))
    for flow in flows:
        flow.close()
    return answered


def _is_connected(flow):
    try:
        flow.getpeername()
    except OSError:
        return False
    return True


@BOTH
async def test_a_flood_of_one_source_is_bounded_and_hurts_nobody_else(edge, vip):
    attacker, other = {VIP4: ("198.51.100.2", "198.51.100.9"), VIP6: ("2001:db8:c::2", "2001:db8:c::9")}[vip]
    await edge.take()
    for source in (attacker, other):  # neighbours know each other before time counts
        await edge.stage.ask(vip, source=(source, 0))
    await edge.take(new_connections_per_second_per_source=10)
    answered = await flood(edge, vip, attacker, 200)
    assert 10 <= answered <= 40, "a burst of twenty, and ten a second"
    assert sum(backend.accepted for backend in edge.stage.backends) <= 42
    started = time.monotonic()
    assert await edge.stage.ask(vip, source=(other, 0)) in NAMES
    assert time.monotonic() - started < 1


async def test_syns_without_an_end_fill_no_table(edge):
    """Ten thousand of one source that never answers: conntrack has no more of them than the limit lets in."""
    await edge.take(new_connections_per_second_per_source=10)
    with edge.stage.client.inside():
        raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    ends = socket.inet_aton("198.51.100.99") + socket.inet_aton(VIP4)
    started = time.monotonic()
    for port in range(20000, 30000):
        head = struct.pack("!BBHHHBBH", 0x45, 0, 40, 1, 0, 64, socket.IPPROTO_TCP, 0) + ends
        segment = struct.pack("!HHIIBBHHH", port, 443, 1, 0, 5 << 4, 0x02, 65535, 0, 0)
        summed = checksum(ends + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(segment)) + segment)
        raw.sendto(head + segment[:16] + struct.pack("!H", summed) + segment[18:], (VIP4, 0))
    raw.close()
    let_in = len(await edge.flows.flows(addresses=["198.51.100.99"]))
    assert 20 <= let_in <= 20 + 10 * (time.monotonic() - started + 1)
    started = time.monotonic()
    assert await edge.stage.ask(VIP4, source=("198.51.100.9", 0)) in NAMES
    assert time.monotonic() - started < 1


async def test_new_udp_flows_of_one_source_are_bounded(edge):
    await edge.take(new_connections_per_second_per_source=10)
    channels = [edge.stage.client.socket(VIP4, socket.SOCK_DGRAM) for _ in range(200)]
    for channel in channels:
        channel.connect((VIP4, 443))
        channel.send(b"?")
    assert await edge.stage.ask_udp(VIP4, source=("198.51.100.9", 0)) in NAMES
    assert 20 <= sum(backend.accepted for backend in edge.stage.backends) <= 41
    for channel in channels:
        channel.close()


@BOTH
async def test_connections_of_one_source_are_bounded(edge, vip):
    await edge.take(connections_per_source=5)
    flows = [await edge.stage.connect(vip) for _ in range(5)]
    with pytest.raises(ConnectionRefusedError):
        await edge.stage.connect(vip)
    if vip == VIP4:
        assert await edge.stage.ask(vip, source=("198.51.100.9", 0)) in NAMES
    for flow in flows:
        assert await flow.echo() == b"ping"
        flow.reset()

    async def has_room():
        try:
            await edge.stage.ask(vip)
        except ConnectionRefusedError:
            return False
        return True

    assert await until(has_room, seconds=15), "ended connections count no longer"


async def test_a_long_stream_outlives_the_profile_of_others(edge):
    """Ten minutes idle, with conntrack's clock shortened: the kernel's own time-out is a second, the service's an hour."""
    sysctl("net/netfilter/nf_conntrack_tcp_timeout_established", "1")
    await edge.take(established_timeout_seconds=3600)
    flow = await edge.stage.connect(VIP4)
    await flow.echo()
    await asyncio.sleep(2.5)
    (entry,) = await edge.flows.flows(addresses=[VIP4])
    assert entry.timeout_seconds > 3500
    assert await flow.echo() == b"ping"
    flow.reset()


async def test_a_udp_flow_is_pinned_until_its_backend_goes(edge):
    wanted = await edge.take(algorithm="round_robin")
    with edge.stage.client.socket(VIP4, socket.SOCK_DGRAM) as channel:
        channel.connect((VIP4, 443))
        first = {await edge.stage.ask_udp(VIP4, channel=channel) for _ in range(8)}
        assert len(first) == 1
        await edge.take(algorithm="round_robin", backends=edge.states(wanted, **{first.copy().pop(): {"state": "ejected"}}))

        async def has_moved():
            return await edge.stage.ask_udp(VIP4, channel=channel) not in first

        assert await until(has_moved, seconds=10)


async def test_probes_take_backends_out_and_in_again(edge):
    wanted = await edge.take(probe=PROBE)

    def words():
        return edge.balancers.services[wanted.id].words()

    async def all_up():
        return set(words().values()) == {"up"}

    assert await until(all_up, seconds=10), words()
    away = edge.stage.backends[2]
    await away.close()

    async def is_down():
        return words()["bk_3"] == "down: Connection refused"

    assert await until(is_down, seconds=10)
    assert set(await edge.stage.spread(VIP4, 30)) == NAMES - {"bk_3"}
    assert (await edge.metric("bedplate_lb_backend_up"))[f'loadbalancer="{wanted.id}",backend="bk_3"'] == 0
    away.listen()
    assert await until(all_up, seconds=10)
    assert "bk_3" in await edge.stage.spread(VIP4, 40)


async def test_address_families_are_probed_apart(edge):
    wanted = await edge.take(probe=PROBE)
    await asyncio.gather(*(_up(edge, wanted.id, name) for name in NAMES))
    away = edge.stage.backends[0]
    await away.close()
    away.listen(addresses=(away.ipv6,))

    async def is_half():
        return edge.balancers.services[wanted.id].words()["bk_1"] == "IPv4: down: Connection refused, IPv6: up"

    assert await until(is_half, seconds=10), edge.balancers.services[wanted.id].words()
    assert "bk_1" not in await edge.stage.spread(VIP4, 30)
    assert "bk_1" in await edge.stage.spread(VIP6, 40)


async def _up(edge, service_id, name):
    async def is_up():
        return edge.balancers.services[service_id].words()[name] == "up"

    assert await until(is_up, seconds=10)


async def test_most_backends_at_once_are_kept_while_they_are_only_silent(edge):
    wanted = await edge.take(probe=PROBE)
    service = edge.balancers.services[wanted.id]
    await asyncio.gather(*(_up(edge, wanted.id, name) for name in NAMES))
    for number in (1, 2, 3):  # a path that is gone: nobody answers, and nobody says no
        ip("link", "set", f"b{number}", "down")

    async def is_held():
        return sum(word.startswith(f"held: {HELD}") for word in service.words().values()) >= 3

    assert await until(is_held, seconds=10), service.words()
    assert set(service.tables[4]) == NAMES
    ip("link", "set", "b1", "up")
    ip("-6", "address", "add", "fd00:9:1::1/64", "dev", "b1", "nodad")

    async def is_seen_again():
        words = service.words()
        return words["bk_1"] == "up" and all(words[name].startswith("down: ") for name in ("bk_2", "bk_3"))

    assert await until(is_seen_again, seconds=10), "half are well: who is still silent is believed to be away"
    assert set(await edge.stage.spread(VIP4, 40)) == {"bk_1", "bk_4"}


async def test_refusals_are_believed_however_many(edge):
    wanted = await edge.take(probe=PROBE)
    service = edge.balancers.services[wanted.id]
    await asyncio.gather(*(_up(edge, wanted.id, name) for name in NAMES))
    for backend in edge.stage.backends[:3]:
        await backend.close()

    async def are_down():
        return sum(word == "down: Connection refused" for word in service.words().values()) == 3

    assert await until(are_down, seconds=10), service.words()
    assert set(await edge.stage.spread(VIP4, 30)) == {"bk_4"}
    await edge.stage.backends[3].close()

    async def is_refused():
        try:
            return not await edge.stage.ask(VIP4)
        except ConnectionRefusedError:
            return set(service.tables[4]) == {""}

    assert await until(is_refused, seconds=10), "nobody is left"


async def test_a_stopped_backend_of_two_loses_no_connect_on_a_busy_host(edge):
    """The cores are taken, and this agent's own loop is paused again and again for longer than a probe may take. The time-out
    is long enough for the kernel to deliver packets between namespaces beside all that: what it delays is no pause of ours.
    """
    probe = ProbeWanted(kind="tcp", interval_ms=100, timeout_ms=400, rise=2, fall=2)
    wanted = await edge.take(probe=probe, backends=edge.wanted().backends[:2])
    service = edge.balancers.services[wanted.id]
    await asyncio.gather(*(_up(edge, wanted.id, name) for name in ("bk_1", "bk_2")))
    words: Counter[str] = Counter()
    edge.balancers.on_change = lambda _id: words.update(service.words().values())
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        for number in range(4):
            asyncio.get_running_loop().call_later(0.6 * number, time.sleep, 0.5)
        assert set(await edge.stage.spread(VIP4, 60)) == {"bk_1", "bk_2"}
        await edge.balancers.leave(["nic_bk_1"])
        await edge.stage.backends[0].close()
        found = await edge.stage.spread(VIP4, 40)
        edge.balancers.machine(["nic_bk_1"], is_running=False)
        found += await edge.stage.spread(VIP4, 40)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found == {"bk_2": 80}, "no connect was lost"
    assert not any(word.startswith(("down: no answer", "held")) for word in words), words


async def test_a_backend_that_returns_is_given_its_flows_slowly(edge):
    wanted = await edge.take(algorithm="round_robin", slow_start_seconds=2)

    async def is_word(word: str) -> bool:
        return edge.balancers.services[wanted.id].words()["bk_1"] == word

    assert await until(lambda: is_word("up"), seconds=5), "all of them begin together"
    homes = edge.balancers.services[wanted.id].tables[4].count("bk_1")
    edge.balancers.machine(["nic_bk_1"], is_running=False)
    assert await until(lambda: is_word("down: its machine ended"), seconds=5)
    assert "bk_1" not in await edge.stage.spread(VIP4, 60)
    edge.balancers.machine(["nic_bk_1"], is_running=True)
    assert await until(lambda: is_word("starting"), seconds=5)
    found = [(await edge.stage.spread(VIP4, 251))["bk_1"]]
    assert 0 < found[0] < homes * 0.6
    while await is_word("starting"):
        found.append((await edge.stage.spread(VIP4, 251))["bk_1"])
    assert (await edge.stage.spread(VIP4, 251))["bk_1"] == homes
    assert sorted(found) == found, "never back"


async def test_silence_is_believed_when_a_try_fails_too(edge):
    wanted = await edge.take()
    edge.balancers.silence(["nic_bk_1", "nic_bk_2"])
    await edge.stage.backends[0].close()
    edge.balancers.silence(["nic_bk_1", "nic_bk_2"])

    async def is_down():
        return edge.balancers.services[wanted.id].words()["bk_1"] == "down: nothing is heard of its host"

    assert await until(is_down, seconds=5)
    assert edge.balancers.services[wanted.id].words()["bk_2"] == "up", "its machine answers, only its host's agent is away"
    edge.stage.backends[0].listen()
    edge.balancers.heard(["nic_bk_1"])
    await _up(edge, wanted.id, "bk_1")


async def test_a_circuit_opens_on_refusals_and_is_tried_again(edge):
    circuit = CircuitWanted(errors=5, window_ms=5000, open_ms=200)
    wanted = await edge.take(circuit=circuit, algorithm="round_robin")
    away = edge.stage.backends[1]
    await away.close()
    await edge.counts.look()
    await errors(edge, 40)
    await edge.counts.look()

    async def is_open():
        return edge.balancers.services[wanted.id].words()["bk_2"] == "circuit open"

    assert await until(is_open, seconds=5)
    assert set(await edge.stage.spread(VIP4, 30)) == NAMES - {"bk_2"}
    label = f'loadbalancer="{wanted.id}",backend="bk_2"'
    assert (await edge.metric("bedplate_lb_circuit_state"))[label] == 2
    assert (await edge.metric("bedplate_lb_backend_errors_total"))[f'{label},kind="refused"'] >= 5
    away.listen()
    await asyncio.sleep(circuit.open_ms / 1000)
    await edge.counts.look()

    async def is_half_open():
        return edge.balancers.services[wanted.id].words()["bk_2"] == "circuit half open"

    assert await until(is_half_open, seconds=5)
    found = await edge.stage.spread(VIP4, 251)
    assert 0 < found["bk_2"] < 20

    async def is_closed():
        await edge.stage.spread(VIP4, 60)
        await edge.counts.look()
        return edge.balancers.services[wanted.id].words()["bk_2"] == "up"

    assert await until(is_closed, seconds=15)


async def errors(edge, count):
    for _ in range(count):
        with contextlib.suppress(ConnectionRefusedError):
            await edge.stage.ask(VIP4)


async def test_live_flows_and_bytes_are_shown(edge):
    wanted = await edge.take()
    flow = await edge.stage.connect(VIP4)
    await flow.echo(b"x" * 100_000)
    label = f'loadbalancer="{wanted.id}",backend="{flow.backend}"'
    assert (await edge.metric("bedplate_lb_backend_live_flows"))[label] == 1
    sent = await edge.metric("bedplate_lb_backend_bytes_total")
    assert sent[f'{label},direction="in"'] > 100_000
    assert sent[f'{label},direction="out"'] > 100_000
    assert set((await edge.metric("bedplate_lb_offloaded_flows")).values()) == {0}
    flow.reset()


async def test_large_payloads_pass_whole(edge):
    """More than the MTU in one write, and a datagram that has to be cut, of both families."""
    await edge.take()
    for vip in (VIP4, VIP6):
        flow = await edge.stage.connect(vip)
        assert len(await flow.echo(b"y" * 1_000_000)) == 1_000_000
        flow.reset()
        channel = edge.stage.client.socket(vip, socket.SOCK_DGRAM)
        channel.connect((vip, 443))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            await loop.sock_sendall(channel, b"z" * 9000)
            assert (await loop.sock_recv(channel, 65536)).endswith(b"z" * 9000)
        channel.close()


async def test_removed_services_leave_nothing(edge):
    wanted = await edge.take(connections_per_source=10, established_timeout_seconds=5)
    flow = await edge.stage.connect(VIP4)
    await edge.balancers.remove(wanted.id)
    await broken(flow)
    assert edge.rules.parts == {}
