"""From rows to hosts: who is told what of firewalls, when, and that nothing boots before its rules are there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.documents import service as documents
from controlplane.kernel import service as kernel
from controlplane.kernel.harness import Harness, Scenario
from controlplane.kernel.world import World
from controlplane.models.firewall import Firewall
from controlplane.models.host import Host
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.firewall.schemas import FirewallCreate, RuleInput, Target
from controlplane.settings import LimitSettings
from hostagent.protocol.results import Failed
from tests.programs.fleet import Fleet, open_fleet
from tests.programs.told import ToldHost

HTTP = {"protocol": "tcp", "port_first": 80, "cidrs": ["203.0.113.0/24"]}


class Guarded:
    """A fleet of two hosts that keep what they are told."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.hosts: dict[str, ToldHost] = {}

    async def add(self, name: str, address: int) -> ToldHost:
        told = ToldHost.before(await self.fleet.add_host(name, address=address), self.fleet.links)
        self.hosts[name] = told
        return told

    async def firewall(self, name: str, **wanted: Any) -> Firewall:
        assert self.fleet.project
        body = FirewallCreate.model_validate({"name": name, **wanted})
        async with self.fleet.database.session() as session:
            return await firewalls.create(session, LimitSettings(), self.fleet.project.id, body)

    async def change(self, firewall_id: str, action: Any, *arguments: Any) -> None:
        async with self.fleet.database.session() as session:
            row = await session.get_one(Firewall, firewall_id, with_for_update={"key_share": True})
            await action(session, row, *arguments)

    async def until_told(self, firewall_id: str) -> Firewall:
        async def is_told() -> bool:
            async with self.fleet.database.session() as session:
                row = await session.get_one(Firewall, firewall_id)
                return row.observed_generation == row.generation

        await self.fleet.until(is_told, f"{firewall_id} told")
        async with self.fleet.database.session() as session:
            return await session.get_one(Firewall, firewall_id)

    def on(self, name: str, firewall_id: str) -> Any:
        return self.hosts[name].of("firewall", firewall_id)


@pytest.fixture
async def guarded(database_url: str, tmp_path: Path) -> AsyncIterator[Guarded]:
    async with open_fleet(database_url, tmp_path) as fleet:
        found = Guarded(fleet)
        for number, name in enumerate("ab", 1):
            await found.add(name, number)
        yield found


async def test_a_machine_starts_after_its_firewalls(guarded: Guarded) -> None:
    """Policy and both firewalls first, then the machine; a refusal holds the machine back, and says why."""
    fleet = guarded.fleet
    extra = await guarded.firewall("extra", rules=[HTTP], networks=["net"])
    guarded.hosts["a"].answers["firewall"] = Failed(code="nft.failed", message="no such table", retryable=True)
    guarded.hosts["b"].answers["firewall"] = Failed(code="nft.failed", message="no such table", retryable=True)
    async with fleet.running():
        vm_id = await fleet.create_vm()

        async def is_held() -> bool:
            run = await fleet.run_of("vm", vm_id)
            async with fleet.database.session() as session:
                waiting = await documents.pending(session, "firewall", extra.id)
            is_said = "no such table" in (run.last_error or "")
            return run.step == "secure" and is_said and [row.failure for row in waiting] == ["nft.failed"]

        await fleet.until(is_held, "the machine held back")
        vm = await fleet.vm(vm_id)
        assert vm
        name = next(name for name, told in guarded.hosts.items() if told.host.id == vm.host_id)
        told = guarded.hosts[name]
        assert "vm.ensure" not in told.requests
        told.answers.clear()
        assert vm.host_id
        await fleet.tell("host_documents", vm.host_id)
        await fleet.until_ready(vm_id)
        first_boot = told.requests.index("vm.ensure")
        assert {"policy.ensure", "firewall.ensure"} <= set(told.requests[:first_boot])
        document = guarded.on(name, extra.id)
        assert [(rule.cidrs, rule.port_first, rule.port_last) for rule in document.rules] == [(("203.0.113.0/24",), 80, 80)]
        assert len(document.members) == 1
        other = next(other for other in guarded.hosts if other != name)
        assert guarded.on(other, extra.id) is None, "a host without members is told nothing"


async def test_a_changed_rule_reaches_only_hosts_with_members(guarded: Guarded) -> None:
    fleet = guarded.fleet
    extra = await guarded.firewall("extra", networks=["net"])
    async with fleet.running():
        vm_id = await fleet.create_vm()
        vm = await fleet.until_ready(vm_id)
        await guarded.until_told(extra.id)
        here = next(name for name, told in guarded.hosts.items() if told.host.id == vm.host_id)
        other = next(name for name in guarded.hosts if name != here)
        before = list(guarded.hosts[other].requests)
        await guarded.change(extra.id, firewalls.add_rule, RuleInput.model_validate(HTTP), "allow")
        assert (await guarded.until_told(extra.id)).observed_generation == 2
        assert len(guarded.on(here, extra.id).rules) == 1
        assert guarded.hosts[other].requests == before
        await fleet.delete_vm(vm_id)
        await fleet.until_gone(vm_id)

        async def is_purged() -> bool:
            return guarded.on(here, extra.id) is None

        await fleet.until(is_purged, "the last member's document purged")


async def test_a_firewall_as_far_end_follows_its_members(guarded: Guarded) -> None:
    """Attached to machines it means their addresses; attached to a network, its prefixes, and then machines may come and go."""
    fleet = guarded.fleet
    async with fleet.running():
        first = await fleet.until_ready(await fleet.create_vm("one"))
        peer = await guarded.firewall("peer", vms=["one"])
        rules = [{"protocol": "any", "firewall": "peer"}, {"protocol": "udp", "network": "net"}]
        guard = await guarded.firewall("guard", networks=["net"], rules=rules)
        await guarded.until_told(guard.id)
        here = next(name for name, told in guarded.hosts.items() if told.host.id == first.host_id)
        by_name, by_network = guarded.on(here, guard.id).rules
        assert [cidr.rpartition("/")[2] for cidr in by_name.cidrs] == ["32", "128"]
        assert fleet.network
        assert by_network.cidrs == tuple(sorted((str(fleet.network.ipv4_cidr), str(fleet.network.ipv6_cidr))))

        await fleet.until_ready(await fleet.create_vm("two"))
        await guarded.change(peer.id, firewalls.attach, Target(vm="two"))

        async def knows_both() -> bool:
            return len(merged_hosts(guarded.on(here, guard.id).rules[0].cidrs)) == 4

        await fleet.until(knows_both, "the second member in the rule")
        await guarded.change(peer.id, firewalls.attach, Target(network="net"))

        async def knows_network() -> bool:
            return set(by_network.cidrs) <= set(guarded.on(here, guard.id).rules[0].cidrs)

        await fleet.until(knows_network, "the network in the rule")


def merged_hosts(cidrs: Sequence[str]) -> list[str]:
    """Addresses in a rule, adjacent ones counted singly."""
    return [cidr for cidr in cidrs for _ in range(2 ** ((32 if "." in cidr else 128) - int(cidr.partition("/")[2])))]


async def test_an_egress_allowance_for_nobody_still_restricts(guarded: Guarded) -> None:
    fleet = guarded.fleet
    async with fleet.running():
        vm = await fleet.until_ready(await fleet.create_vm())
        await guarded.firewall("nobody")
        rules = [{"direction": "egress", "protocol": "any", "firewall": "nobody"}, {"protocol": "any", "firewall": "nobody"}]
        guard = await guarded.firewall("guard", networks=["net"], rules=rules)
        await guarded.until_told(guard.id)
        here = next(name for name, told in guarded.hosts.items() if told.host.id == vm.host_id)
        (only,) = guarded.on(here, guard.id).rules
        assert (only.direction, only.cidrs) == ("egress", ("0.0.0.0/32",))


async def test_policy_denies_hosts_and_what_the_operator_names(guarded: Guarded) -> None:
    fleet = guarded.fleet
    async with fleet.running():
        await fleet.until_ready(await fleet.create_vm())

        async def both_know() -> bool:
            async with fleet.database.session() as session:
                await kernel.start(session, "policy", "all")
            return all(told.of("policy", "policy") is not None for told in guarded.hosts.values())

        await fleet.until(both_know, "policy on both hosts")
        policy = guarded.hosts["a"].of("policy", "policy")
        assert {"192.0.2.1/32", "192.0.2.2/32", "2001:db8::1/128", "2001:db8::2/128"} <= set(policy.infrastructure_cidrs)
        assert policy.is_enforced
        assert fleet.network
        assert "10.192.0.0/10" in policy.private_cidrs


async def test_a_lost_host_holds_nothing_up_and_is_told_when_it_is_back(guarded: Guarded) -> None:
    fleet = guarded.fleet
    guard = await guarded.firewall("guard", networks=["net"])
    async with fleet.running():
        vm = await fleet.until_ready(await fleet.create_vm())
        assert vm.host_id
        here = next(name for name, told in guarded.hosts.items() if told.host.id == vm.host_id)
        await guarded.until_told(guard.id)
        fleet.links.cut(vm.host_id)
        async with fleet.database.session() as session:
            (await session.get_one(Host, vm.host_id)).link = "lost"
        await guarded.change(guard.id, firewalls.add_rule, RuleInput.model_validate(HTTP), "allow")
        await guarded.until_told(guard.id)
        assert guarded.on(here, guard.id).rules == ()
        fleet.links.mend(vm.host_id)
        await fleet.tell("host_documents", vm.host_id, "link")

        async def is_told() -> bool:
            return len(guarded.on(here, guard.id).rules) == 1

        await fleet.until(is_told, "the host told after its return")


@pytest.mark.parametrize("program", ["firewall", "host_documents", "policy"])
async def test_they_survive_everything(guarded: Guarded, program: str) -> None:
    fleet = guarded.fleet
    assert fleet.project

    async def make(world: World[Any], number: int) -> str:
        del world
        if program == "firewall":
            return (await guarded.firewall(f"guard-{number}", rules=[HTTP], networks=["net"])).id
        subject = "all" if program == "policy" else guarded.hosts["a"].host.id
        async with fleet.database.session() as session:
            await kernel.start(session, program, subject)
        return subject

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        del world, subject
        return []

    scenario = Scenario(registry=fleet.registry, program=program, make=make, leftovers=leftovers)
    assert await Harness(fleet.world, scenario).run(stride=4) > 3
