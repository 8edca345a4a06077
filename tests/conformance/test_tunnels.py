"""Tunnel drivers: the fake and WireGuard live the same life; what WireGuard does is shown by packets between two hosts."""

from __future__ import annotations

import base64
import os
import signal
import stat
from dataclasses import replace

import pytest

from hostagent.drivers.network.fake import FakeTunnels
from hostagent.drivers.network.reach import (
    TunnelDriver,
)
from hostagent.drivers.network.tunnel_keys import TunnelKeys
from hostagent.drivers.network.wireguard import WireGuard
from hostagent.lib.seal import HostSealer
from hostagent.lib.wait import until
from hostagent.protocol.network import TunnelInterfaceWanted, TunnelPeerWanted, TunnelWanted
from tests.capabilities import has_capability
from tests.conformance.conftest import Daemon
from tests.conformance.wires import ONE, Pinging, frames, heard, joined, run, two_hosts

REAL = pytest.param("real", marks=pytest.mark.caps("root", "netns", "wireguard"))
A = TunnelInterfaceWanted(slot="a", listen_port=51820, key_generation=1)
B = TunnelInterfaceWanted(slot="b", listen_port=51821, key_generation=2)
SECRET = "c0ffee"


def peer(number: int, slot: str = "a") -> TunnelPeerWanted:
    return TunnelPeerWanted(
        host_id=f"host_{number}",
        slot=slot,
        public_key=base64.b64encode(bytes([number]) * 32).decode(),
        endpoint_address="192.0.2.9",
        endpoint_port=51820,
        allowed_cidrs=(f"10.93.{number}.1/32", f"fd00:93:{number}::1/128"),
    )


@pytest.fixture(params=["fake", REAL])
async def tunnels(request, paths):
    if request.param == "fake":
        yield FakeTunnels()
        return
    request.getfixturevalue("own_network")
    daemon = Daemon(paths)
    await daemon.start()
    machine_id = paths.state.parent / "machine-id"
    machine_id.write_text(os.urandom(16).hex())
    paths = replace(paths, machine_id=machine_id)
    driver = WireGuard(daemon.driver, paths, TunnelKeys(paths.tunnel_keys, HostSealer(paths.host_key)))
    yield driver
    await driver.remove()
    await daemon.stop()


async def test_tunnels_live_their_life(tunnels: TunnelDriver):
    assert await tunnels.observe(None) is None
    await tunnels.remove()
    wanted = TunnelWanted(id="tunnel", generation=ONE, interfaces=(A,), peers=(peer(1), peer(2)), addresses=("10.93.255.1",))

    made = await tunnels.apply(wanted)
    assert made.differences == ()
    assert await tunnels.apply(wanted) == made
    key = made.interfaces[0].public_key
    assert len(base64.b64decode(key)) == 32
    fewer = replace(wanted, peers=(peer(2), peer(3)))
    assert (await tunnels.observe(fewer)).differences
    assert (await tunnels.apply(fewer)).differences == ()

    both = replace(wanted, interfaces=(A, B), peers=(peer(1), peer(1, "b")))
    keys = {interface.slot: interface.public_key for interface in (await tunnels.apply(both)).interfaces}
    assert keys["a"] == key != keys["b"]
    rest = await tunnels.apply(replace(both, interfaces=(B,), peers=(peer(1, "b"),)))
    assert [(interface.slot, interface.public_key) for interface in rest.interfaces] == [("b", keys["b"])]
    again = await tunnels.apply(replace(wanted, interfaces=(replace(A, key_generation=3),), peers=()))
    assert again.interfaces[0].public_key not in (key, keys["b"])

    await tunnels.remove()
    assert await tunnels.observe(None) is None


@pytest.mark.caps("root", "netns", "wireguard")
async def test_a_private_key_is_sealed_and_seen_by_nobody(paths):
    keys = TunnelKeys(paths.tunnel_keys, HostSealer(paths.host_key))
    public = await keys.public("a", 1)
    (file,) = paths.tunnel_keys.iterdir()
    private = (await keys.private("a", 1)).strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = file.read_bytes()
    for form in (private, base64.b64decode(private), base64.b64decode(private).hex().encode()):
        assert form not in content
    assert await TunnelKeys(paths.tunnel_keys, HostSealer(paths.host_key)).public("a", 1) == public
    keys.keep(frozenset())
    assert list(paths.tunnel_keys.iterdir()) == []


@pytest.mark.caps("root", "netns", "wireguard")
async def test_guests_of_two_hosts_talk_and_nobody_can_listen(tmp_path):
    async with two_hosts(tmp_path) as (one, two):
        await joined(one, two, {"a": 1})
        await one.route(two, "a")
        await two.route(one, "a")
        wire = one.capture()
        for address in (two.nic.ipv4, two.nic.ipv6):
            for size in ("56", "1400", "9000"):
                sent, received, said = one.ping(address, "-c2", "-i0.1", "-W5", "-s", size, "-p", SECRET)
                assert (sent, received) == (2, 2), said
        passed = frames(wire)
        wire.close()
        assert sum(len(frame) for frame in passed) > 2 * 2 * 9000
        assert not any(bytes.fromhex(SECRET * 2) in frame for frame in passed)

        # nothing is too large for a guest that asks: the way's size is told, in both families
        for address in (two.nic.ipv4, two.nic.ipv6):
            assert one.ping(address, "-c1", "-W5", "-Mdo", "-s", "1372")[1] == 1

        # a peer that is taken out is not reached, and what was for it goes nowhere in the clear
        wire = one.capture()
        await one.tunnel({"a": 1})
        with one.inside():
            await one.tunnels.remove()
        sent, received, said = one.ping(two.nic.ipv4, "-c2", "-i0.1", "-W1", "-p", SECRET)
        assert (received, "errors" in said) == (0, True), said
        assert not any(bytes.fromhex(SECRET * 2) in frame for frame in frames(wire))
        wire.close()


@pytest.mark.caps("root", "netns", "wireguard")
async def test_a_guest_with_a_larger_mtu_is_told_the_ways(tmp_path):
    async with two_hosts(tmp_path, mtu_bytes=1500) as (one, two):
        await joined(one, two, {"a": 1})
        await one.route(two, "a")
        await two.route(one, "a")
        for address, overhead in ((two.nic.ipv4, 28), (two.nic.ipv6, 48)):
            assert one.ping(address, "-c1", "-W2", "-Mdo", "-s", str(1460 - overhead))[1] == 0
            route = run(*one.guest_argv("ip", "route", "get", address))
            assert "mtu 1420" in route, route
            assert one.ping(address, "-c3", "-i0.1", "-W1", "-s", "9000")[1] >= 2  # the answer's first learns it too


@pytest.mark.caps("root", "netns", "wireguard")
async def test_keys_are_rotated_without_losing_a_ping(tmp_path):
    async with two_hosts(tmp_path) as (one, two):
        await joined(one, two, {"a": 1})
        await one.route(two, "a")
        await two.route(one, "a")
        pings = [Pinging(one, two.nic.ipv4), Pinging(one, two.nic.ipv6), Pinging(two, one.nic.ipv4)]
        slots = {"a": 1, "b": 2}
        await joined(one, two, slots)

        async def both_heard() -> bool:
            return await heard(one, two, slots) and await heard(two, one, slots)

        assert await until(both_heard, seconds=20)
        await one.route(two, "b")
        await two.route(one, "b")
        await joined(one, two, {"b": 2})
        results = [await pinging.ended() for pinging in pings]
        assert [sent - received for sent, received in results] == [0, 0, 0], results
        assert all(sent > 20 for sent, _ in results)
        assert list(one.paths.tunnel_keys.glob("a-*")) == []


@pytest.mark.caps("root", "netns", "wireguard")
async def test_only_the_right_key_is_heard_and_a_dead_process_is_replaced(tmp_path):
    async with two_hosts(tmp_path) as (one, two):
        stranger = TunnelKeys(tmp_path / "stranger", HostSealer(tmp_path / "host.key"))
        await two.tunnel({"a": 1}, one.peer("a", await one.keys.public("a", 1)))
        await one.tunnel({"a": 1}, two.peer("a", await stranger.public("a", 1)))
        await one.route(two, "a")
        await two.route(one, "a")
        assert one.ping(two.nic.ipv4, "-c2", "-i0.2", "-W1")[1] == 0
        assert not await heard(two, one, {"a": 1})

        await joined(one, two, {"a": 1})
        assert one.ping(two.nic.ipv4, "-c1", "-W5")[1] == 1
        seen = await one.tunnel({"a": 1}, two.peer("a", await two.keys.public("a", 1)))
        assert seen.interfaces[0].driver == ("kernel" if has_capability("kernel_wireguard") else "userspace")
        if seen.interfaces[0].driver == "userspace":
            assert seen.interfaces[0].incarnation
            os.kill(seen.interfaces[0].incarnation.pid, signal.SIGKILL)
        else:
            run("ip", "-n", one.netns, "link", "delete", seen.interfaces[0].interface)

        async def is_seen() -> bool:
            with one.inside():
                return await one.tunnels.observe(None) is None

        assert await until(is_seen, seconds=10)
        again = await one.tunnel({"a": 1}, two.peer("a", await two.keys.public("a", 1)))
        await one.route(two, "a")
        assert again.interfaces[0].public_key == seen.interfaces[0].public_key
        assert one.ping(two.nic.ipv4, "-c1", "-W10")[1] == 1
