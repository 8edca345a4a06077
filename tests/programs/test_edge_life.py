"""Reserved addresses and load balancers on hosts: who is told, who follows whom, and what is left at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from sqlalchemy import func, select

from controlplane.core.clock import SystemClock
from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.address import Address
from controlplane.models.firewall import Firewall
from controlplane.models.host_document import HostDocument
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.nic import Nic
from controlplane.resources.address import service as addresses
from controlplane.resources.address.schemas import AddressAttach
from controlplane.resources.loadbalancer import service as loadbalancers
from controlplane.resources.loadbalancer.schemas import Eject
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Running
from hostagent.protocol.verbs import BackendTraffic
from tests.programs.edges import Edges, edges, two_vms

__all__ = ["edges"]


async def test_an_address_moves_between_machines_in_under_a_second(edges: Edges) -> None:
    """The host that has it lets go before the other is told; it survives the machine under it."""
    async with edges.fleet.running():
        first, second = await two_vms(edges)
        address_id = await edges.reserve()
        await edges.change(Address, address_id, addresses.attach, AddressAttach(vm="one"))
        await edges.until_held("address", address_id, [first])
        document = edges.hosts[first].of("address", address_id)
        assert (document.address, document.announce) == ("203.0.113.1", "arp")
        assert document.private_address.startswith("10.192.")
        await edges.until_settled(Address, address_id)
        began = time.monotonic()
        await edges.change(Address, address_id, addresses.attach, AddressAttach(vm="two", move=True))
        await edges.until_held("address", address_id, [second])
        assert time.monotonic() - began < 1.0
        told = edges.hosts[first].requests + edges.hosts[second].requests
        assert told.count("address.purge") == 1
        await edges.until_settled(Address, address_id)

        async with edges.fleet.database.session() as session:
            vm_id = (await session.get_one(Address, address_id)).vm_id
        assert vm_id
        await edges.fleet.delete_vm(vm_id)
        await edges.fleet.until_gone(vm_id)
        await edges.until_held("address", address_id, [])
        async with edges.fleet.database.session() as session:
            row = await session.get_one(Address, address_id)
            assert (str(row.address), row.vm_id) == ("203.0.113.1", None)


async def test_a_load_balancer_from_rows_to_edges_and_back_to_nothing(edges: Edges) -> None:
    """Long, because it is one life."""
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        address_id = await edges.reserve()
        backends = [{"vm": "one"}, {"vm": "two", "weight": 3}]
        lb_id = await edges.balancer(backends=backends, addresses=["front"], network="net", profile="grpc")
        await edges.until_held("loadbalancer", lb_id, ["e", "f"])
        document = edges.hosts["e"].of("loadbalancer", lb_id)
        assert document.vips[0] == "203.0.113.1"
        assert [(one.protocol, one.port, one.target_port) for one in document.listeners] == [("tcp", 80, 8080)]
        assert sorted(one.weight for one in document.backends) == [1, 3]
        assert {one.host_id for one in document.backends} == {edges.hosts[name].id for name in "ab"}
        assert document.established_timeout_seconds == 5
        other = edges.hosts["f"].of("loadbalancer", lb_id)
        assert [replace(one, reply="direct") for one in other.backends] == [
            replace(one, reply="direct") for one in document.backends
        ]

        holders = edges.holding("address", address_id)
        assert len(holders) == 1, "by ARP one edge announces, not both"
        await edges.until_settled(Loadbalancer, lb_id)
        async with fleet.database.session() as session:
            private = (await session.scalars(select(Nic).where(Nic.owner_id == lb_id))).one()
            owned = (await session.scalars(select(Firewall).where(Firewall.owner_id == lb_id))).one()
        assert private.host_id in {edges.hosts[name].id for name in "ef"}
        assert str(private.ipv4) in document.vips

        async def is_open() -> bool:
            return edges.holding("firewall", owned.id) == ["a", "b"]

        await fleet.until(is_open, "the backends' port open to the edges")
        (rule,) = edges.hosts["a"].of("firewall", owned.id).rules
        assert (rule.port_first, rule.port_last, rule.protocol) == (8080, 8080, "tcp")
        assert {"192.0.2.3/32", "192.0.2.4/32"} <= set(rule.cidrs)

        await edges.change(Loadbalancer, lb_id, loadbalancers.remove)

        async def is_gone() -> bool:
            return await edges.show(lb_id) is None

        await fleet.until(is_gone, "the load balancer gone")
        await edges.until_held("loadbalancer", lb_id, [])
        await edges.until_held("address", address_id, [])
        await edges.until_held("firewall", owned.id, [])
        async with fleet.database.session() as session:
            assert (await session.get_one(Address, address_id)).loadbalancer_id is None
            assert await session.scalar(select(func.count()).select_from(Nic).where(Nic.owner_id == lb_id)) == 0


async def test_clients_are_kept_where_a_way_leads_back(edges: Edges) -> None:
    """Masqueraded until both ends have carried out the way; a backend that comes later waits for its own."""
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        edges.hosts["a"].answers["edgeways"] = Running(step="ways")
        lb_id = await edges.balancer(backends=[{"vm": "one"}, {"vm": "two"}], network="net")
        await edges.until_held("loadbalancer", lb_id, ["e", "f"])
        a, b = edges.hosts["a"].id, edges.hosts["b"].id

        def replies(name: str) -> dict[str, str]:
            return {backend.host_id: backend.reply for backend in edges.hosts[name].of("loadbalancer", lb_id).backends}

        async def is_half_open() -> bool:
            return all(replies(name) == {a: "masqueraded", b: "way"} for name in "ef")

        await fleet.until(is_half_open, "only the way to the host that has it")
        del edges.hosts["a"].answers["edgeways"]

        async def is_open() -> bool:
            return all(replies(name) == {a: "way", b: "way"} for name in "ef")

        await fleet.until(is_open, "both ways")
        document = edges.hosts["e"].of("loadbalancer", lb_id)
        assert document.client_address == "kept"
        there, back = (edges.hosts[name].of("edgeways", "edgeways") for name in "ea")
        assert {way.host_id for way in there.outward} == {a, b}
        assert {way.host_id for way in back.inward} == {edges.hosts[name].id for name in "ef"}
        (way,) = (way for way in back.inward if way.host_id == edges.hosts["e"].id)
        assert way.network == there.network
        assert way.address == there.address
        (out,) = (way for way in there.outward if way.host_id == a)
        assert {(address, "tcp", 8080) for address in out.destinations} == set(way.accepts)
        assert there.mtu_bytes == 1370

        await edges.change(Loadbalancer, lb_id, loadbalancers.remove)
        await edges.until_held("loadbalancer", lb_id, [])
        for name in "abef":
            await edges.until_held("edgeways", "edgeways", [])
            assert edges.hosts[name].of("edgeways", "edgeways") is None


async def test_an_edge_that_cannot_probe_so_much_is_named_with_its_numbers(edges: Edges) -> None:
    fleet = edges.fleet
    words = "its checks cost 5000 TCP probes a second, 700 are made, this host sustains 4198"
    edges.hosts["f"].refusals["loadbalancer"] = AgentError("loadbalancer.too_many_probes", words, retryable=False)
    async with fleet.running():
        await two_vms(edges)
        probe = {"kind": "tcp", "interval_ms": 100, "timeout_ms": 100}
        lb_id = await edges.balancer(backends=[{"vm": "one"}], network="net", probe=probe)
        await edges.until_held("loadbalancer", lb_id, ["e"])

        async def is_said() -> bool:
            shown = await edges.show(lb_id)
            said = {one.reason: one.message for one in shown.conditions} if shown else {}
            return said.get("loadbalancer.too_many_probes") == f"f: {words}"

        await fleet.until(is_said, "the refusal shown")


async def test_what_edges_see_is_shown(edges: Edges) -> None:
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        lb_id = await edges.balancer(backends=[{"vm": "one"}, {"vm": "two"}], network="net")
        await edges.until_held("loadbalancer", lb_id, ["e", "f"])
        first, second = (one.id for one in edges.hosts["e"].of("loadbalancer", lb_id).backends)
        edges.hosts["e"].details[lb_id] = {
            f"up:{first}": "up",
            f"up:{second}": "IPv4: up, IPv6: down: refused",
            "client_address": "masqueraded",
        }
        carried = BackendTraffic(id=first, bytes_in=100, bytes_out=9000, flows=3, live_flows=1)
        edges.hosts["e"].traffic[lb_id] = edges.hosts["f"].traffic[lb_id] = (carried,)
        edges.hosts["f"].details[lb_id] = {f"up:{first}": "down", f"up:{second}": "up"}
        await fleet.tell("loadbalancer", lb_id, "host_event")

        async def is_seen() -> bool:
            shown = await edges.show(lb_id)
            return shown is not None and sorted(machine.state for machine in shown.machines) == ["down", "up"]

        await fleet.until(is_seen, "the edges' words shown")
        shown = await edges.show(lb_id)
        assert shown
        assert shown.status == "degraded"
        assert {edge.host: edge.client_address for edge in shown.carried_by} == {"e": "masqueraded", "f": "unknown"}
        down = next(machine for machine in shown.machines if machine.state == "down")
        assert down.traffic
        assert (down.traffic["bytes_out"], down.traffic["flows"], down.traffic["live_flows"]) == (18_000, 6, 2)
        since = {seen.host: seen.since for seen in down.seen}
        await fleet.tell("loadbalancer", lb_id, "host_event")
        await asyncio.sleep(0)
        again = await edges.show(lb_id)
        assert again
        assert {
            seen.host: seen.since for machine in again.machines if machine.nic_id == down.nic_id for seen in machine.seen
        } == since


async def test_an_ejection_ends_by_itself_and_a_removed_backend_is_remembered(edges: Edges) -> None:
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        lb_id = await edges.balancer(backends=[{"vm": "one"}, {"vm": "two"}], network="net")
        await edges.until_held("loadbalancer", lb_id, ["e", "f"])
        now = SystemClock().now()
        await edges.change(Loadbalancer, lb_id, loadbalancers.eject, "one", Eject(seconds=1), now)

        def states() -> list[str]:
            return sorted(one.state for one in edges.hosts["e"].of("loadbalancer", lb_id).backends)

        async def is_out() -> bool:
            return states() == ["active", "ejected"]

        async def is_back() -> bool:
            return states() == ["active", "active"]

        await fleet.until(is_out, "ejected")
        await fleet.until(is_back, "back by itself")
        await edges.change(Loadbalancer, lb_id, loadbalancers.remove_backend, "one")

        async def is_removed() -> bool:
            return states() == ["active", "removed"]

        await fleet.until(is_removed, "listed as removed, so that its leaving moves nobody else's flows")


async def test_edges_and_hosts_of_backends_hear_of_each_other(edges: Edges) -> None:
    """With a key that both have and no table holds; what is not balanced any more is not listened to."""
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        lb_id = await edges.balancer(backends=[{"vm": "one"}, {"vm": "two"}], network="net")
        await edges.until_held("notices", "notices", ["a", "b", "e", "f"])

        def told(name: str) -> dict[str, Any]:
            peers = edges.hosts[name].of("notices", "notices").peers
            names = {host.id: name for name, host in edges.hosts.items()}
            return {names[peer.host_id]: peer for peer in peers}

        async def is_whole() -> bool:
            return all(set(told(name)) == set(others) for name, others in {"a": "ef", "b": "ef", "e": "ab", "f": "ab"}.items())

        await fleet.until(is_whole, "every pair told")
        here, there = told("a")["e"], told("e")["a"]
        assert (here.key, here.sends, here.accepts) == (there.key, there.accepts, ())
        assert len(bytes.fromhex(here.key)) == 32
        assert len({told("a")[name].key for name in "ef"} | {told("b")[name].key for name in "ef"}) == 4
        async with fleet.database.session() as session:
            rows = await session.scalars(select(HostDocument.document).where(HostDocument.kind == "notices"))
            assert {peer["key"] for row in rows for peer in cast("Any", row)["peers"]} == {""}
        await edges.change(Loadbalancer, lb_id, loadbalancers.remove)
        await edges.until_held("notices", "notices", [])


async def test_a_deleted_machine_is_no_backend(edges: Edges) -> None:
    fleet = edges.fleet
    async with fleet.running():
        await two_vms(edges)
        lb_id = await edges.balancer(backends=[{"vm": "one"}, {"vm": "two"}], network="net")
        await edges.until_held("loadbalancer", lb_id, ["e", "f"])
        shown = await edges.show(lb_id)
        assert shown
        async with fleet.database.session() as session:
            vm_id = await session.scalar(select(Nic.owner_id).where(Nic.id == shown.machines[0].nic_id))
        assert vm_id
        await fleet.delete_vm(vm_id)

        async def is_out() -> bool:
            return len(edges.hosts["e"].of("loadbalancer", lb_id).backends) == 1

        await fleet.until(is_out, "out of the balancer")
        await fleet.until_gone(vm_id)
        shown = await edges.show(lb_id)
        assert shown
        assert len(shown.backends) == 1


@pytest.mark.parametrize("program", ["address", "loadbalancer"])
async def test_they_survive_everything(edges: Edges, program: str) -> None:
    fleet = edges.fleet

    async def make(world: World[Any], number: int) -> str:
        del world
        if program == "loadbalancer":
            return await edges.balancer(f"web-{number}", network="net")
        address_id = await edges.reserve(f"front-{number}")
        async with fleet.database.session() as session:
            await kernel.start(session, program, address_id)
        return address_id

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        async with world.database.session() as session:
            left = await session.scalars(select(Nic.id).where(Nic.owner_id == subject))
            found = [f"nic {nic_id}" for nic_id in left]
            row = await session.get(Loadbalancer, subject)
        return found + (["row"] if row is not None else []) + edges.holding(program, subject)

    scenario = Scenario(registry=fleet.registry, program=program, make=make, leftovers=leftovers, changes=("host", "link"))
    assert await Harness(fleet.world, scenario).run(stride=6) > 3
