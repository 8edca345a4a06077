"""The mesh of tunnels on the real agent with fake drivers: who is told what, and how keys take turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from controlplane.kernel import service as kernel
from controlplane.models.incident import Incident
from controlplane.models.network import Network
from controlplane.models.tunnel import HostTunnel, TunnelRotation
from controlplane.resources.tunnel import service as tunnels
from controlplane.resources.tunnel.errors import TunnelsRotating
from tests.fakehost import FakeHost
from tests.programs.fleet import Fleet, open_fleet


@pytest.fixture
async def fleet(database_url: str, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with open_fleet(database_url, tmp_path) as fleet:
        yield fleet


async def two_vms(fleet: Fleet, network: str = "net") -> None:
    for vm_id in [await fleet.create_vm(f"{network}-{n}", network=network) for n in range(2)]:
        await fleet.until_ready(vm_id)


async def slots(fake: FakeHost) -> set[str]:
    """Through which slots the host sends; "" is in the clear."""
    seen = await fake.routes.observe()
    return {route.slot for route in seen.routes} if seen else set()


async def until_slots(fleet: Fleet, wanted: set[str], *hosts: FakeHost) -> None:
    async def is_so() -> bool:
        return all([await slots(fake) == wanted for fake in hosts])

    await fleet.until(is_so, f"routes by {wanted}")


def own_of(fake: FakeHost) -> set[str]:
    assert fake.tunnels.present
    return {f"{address}/{128 if ':' in address else 32}" for address in fake.tunnels.present.addresses}


async def test_hosts_of_an_encrypted_network_are_each_others_peers(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    gateway = await fleet.add_host("g", address=4, roles=("gateway",))
    async with fleet.running():
        await two_vms(fleet)
        await until_slots(fleet, {"a"}, a, b, gateway)
        for fake, others in ((a, {b.id, gateway.id}), (b, {a.id, gateway.id}), (gateway, {a.id, b.id})):
            wanted = fake.tunnels.present
            assert wanted
            assert {peer.host_id for peer in wanted.peers} == others
            assert wanted.mtu_bytes == 1420
            for peer in wanted.peers:
                assert peer.public_key == fleet.hosts[peer.host_id].tunnels.public_key("a", 1)
                assert peer.endpoint_address.startswith("192.0.2.")
        assert gateway.tunnels.present
        own = own_of(gateway)
        assert a.tunnels.present
        (to_gateway,) = (peer for peer in a.tunnels.present.peers if peer.host_id == gateway.id)
        assert set(to_gateway.allowed_cidrs) == own
        seen = await a.routes.observe()
        assert seen
        assert own <= {route.destination_cidr for route in seen.routes}
        assert fleet.network
        assert set(seen.unreachable_cidrs) == {str(fleet.network.ipv4_cidr), str(fleet.network.ipv6_cidr)}
        assert not {route.destination_cidr for route in seen.routes} & own_of(a)


async def test_a_plain_network_beside_an_encrypted_one(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    plain = await fleet.create_network("plain", "none")
    assert plain.mtu_bytes == 1500
    async with fleet.running():
        await two_vms(fleet)
        await two_vms(fleet, "plain")
        await until_slots(fleet, {"a", ""}, a, b)
        seen = await a.routes.observe()
        assert seen
        assert {route.slot for route in seen.routes if route.destination_cidr.startswith("10.192.1.")} == {""}
        assert {route.via for route in seen.routes if not route.slot} == {"192.0.2.2", "2001:db8::2"}
        assert str(plain.ipv4_cidr) not in seen.unreachable_cidrs
        async with fleet.database.session() as session:
            assert (await session.scalars(select(Network.mtu_bytes).where(Network.name == "net"))).one() == 1420


async def test_keys_take_turns_and_a_host_that_is_away_keeps_the_old_ones(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    async with fleet.running():
        await two_vms(fleet)
        await until_slots(fleet, {"a"}, a, b)
        fleet.links.cut(b.id, "no route to host")
        async with fleet.database.session() as session:
            await tunnels.rotate(session, fleet.world.clock.now())

        async def has_both() -> bool:
            present = a.tunnels.present
            return present is not None and {interface.slot for interface in present.interfaces} == {"a", "b"}

        await fleet.until(has_both, "the second interface")
        assert await slots(a) == {"a"}
        with pytest.raises(TunnelsRotating):
            async with fleet.database.session() as session:
                await tunnels.rotate(session, fleet.world.clock.now())

        fleet.links.mend(b.id)
        for program in ("host_tunnel", "host_routes"):
            await fleet.tell(program, b.id)
        await until_slots(fleet, {"b"}, a, b)

        async def is_over() -> bool:
            wanted = [fake.tunnels.present for fake in (a, b)]
            return all(w is not None and [i.slot for i in w.interfaces] == ["b"] for w in wanted)

        await fleet.until(is_over, "the old interface gone")
        async with fleet.database.session() as session:
            row = await session.get_one(TunnelRotation, 1)
            assert (row.key_generation, row.is_rotating) == (2, False)
            await tunnels.rotate(session, fleet.world.clock.now())
        await until_slots(fleet, {"a"}, a, b)
        assert a.tunnels.present
        (peer,) = {(peer.slot, peer.public_key) for peer in a.tunnels.present.peers if peer.slot == "a"}
        assert peer == ("a", b.tunnels.public_key("a", 3))


async def test_a_peer_that_is_not_heard_by_the_new_key_is_not_moved_and_told_of(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    async with fleet.running():
        await two_vms(fleet)
        await until_slots(fleet, {"a"}, a, b)
        a.tunnels.silent.add(b.id)
        async with fleet.database.session() as session:
            await tunnels.rotate(session, fleet.world.clock.now())

        async def has_keys() -> bool:
            async with fleet.database.session() as session:
                return set(await session.scalars(select(HostTunnel.key_generation_b))) == {2}

        await fleet.until(has_keys, "new keys")
        async with fleet.database.session() as session:
            long_ago = fleet.world.clock.now().replace(year=2020)
            await session.execute(update(TunnelRotation).values(started_at=long_ago))
            await kernel.start(session, "routes", "all")

        async def is_told() -> bool:
            async with fleet.database.session() as session:
                found = await session.scalar(select(Incident).where(Incident.code == "tunnel.rotation_late"))
                return found is not None and f"{min(a.id, b.id)} and {max(a.id, b.id)}" in found.detail

        await fleet.until(is_told, "the incident")
        assert (await slots(a), await slots(b)) == ({"a"}, {"a"})
        a.tunnels.silent.clear()
        await fleet.tell("host_tunnel", a.id)
        await until_slots(fleet, {"b"}, a, b)


async def test_old_keys_are_rotated_by_themselves(fleet: Fleet) -> None:
    a, b = await fleet.add_host("a", address=1), await fleet.add_host("b", address=2)
    async with fleet.running():
        await two_vms(fleet)
        await until_slots(fleet, {"a"}, a, b)
        async with fleet.database.session() as session:
            await session.execute(update(TunnelRotation).values(created_at=fleet.world.clock.now().replace(year=2020)))
            await kernel.start(session, "routes", "all")
        await until_slots(fleet, {"b"}, a, b)
