"""The verbs of firewalls and policy without a kernel: what is refused, what flows end, what a new agent takes up."""

from __future__ import annotations

import pytest

from hostagent.drivers.network.protocol import End, Flow
from hostagent.drivers.registry import fake_drivers
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.verbs import Subject
from hostagent.protocol.wanted import Generation, NicWanted, Purge
from hostagent.verbs import firewall, nic, rules
from hostagent.verbs.context import open_agent

NIC = NicWanted(
    id="nic_000000000001",
    generation=Generation(epoch=1, number=1),
    mac="06:00:00:00:00:01",
    ipv4="10.93.0.2",
    ipv6="fd93::2",
)
MEMBER = FirewallMemberWanted(nic_id=NIC.id, ipv4=NIC.ipv4, ipv6=NIC.ipv6)


def rule(**fields) -> FirewallRuleWanted:
    plain = {"direction": "ingress", "action": "allow", "protocol": "tcp", "cidrs": ("0.0.0.0/0",)}
    return FirewallRuleWanted(**(plain | fields))


def document(number: int, *chosen: FirewallRuleWanted) -> FirewallWanted:
    return FirewallWanted(id="fw_1", generation=Generation(epoch=1, number=number), rules=chosen, members=(MEMBER,))


def policy(number: int, *, is_enforced: bool = True) -> PolicyWanted:
    return PolicyWanted(id="policy", generation=Generation(epoch=1, number=number), is_enforced=is_enforced)


def flow(source: str, destination: str, port: int, *, protocol: int = 6) -> Flow:
    return Flow(
        family=2,
        protocol=protocol,
        original=End(source=source, source_port=40_000, destination=destination, destination_port=port),
        reply=End(source=destination, source_port=port, destination=source, destination_port=40_000),
        mark=0,
        status=0,
        timeout_seconds=100,
        packets=0,
        bytes_=0,
        key=f"{source}{port}".encode(),
    )


@pytest.fixture
async def agent(tmp_path):
    made = await open_agent(Paths.under(tmp_path), HostConfig(), fake_drivers(), version="test")
    await rules.start(made)
    yield made
    await made.jobs.close()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (rule(cidrs=("10.0.0.1/24",)), "firewall.invalid"),
        (rule(cidrs=("10.0.0.0/33",)), "firewall.invalid"),
        (rule(port_first=90, port_last=80), "firewall.invalid"),
        (rule(port_first=0, port_last=80), "firewall.invalid"),
        (rule(port_first=1, port_last=70_000), "firewall.invalid"),
        (rule(protocol="icmp", port_first=1, port_last=2), "firewall.invalid"),
        (rule(protocol="any", port_first=1, port_last=2), "firewall.invalid"),
    ],
)
async def test_what_no_host_can_carry_out_is_refused(agent, wrong, code):
    with pytest.raises(AgentError) as caught:
        await firewall.ensure(agent, document(1, wrong))
    assert (caught.value.code, caught.value.retryable) == (code, False)
    assert agent.documents.all("firewall") == ()


async def test_rules_that_make_too_many_boxes_are_refused(agent):
    """Staggered port ranges, each with prefixes of its own: every step between two edges is another list of prefixes."""
    staggered = [
        rule(port_first=1 + n, port_last=1000 + n, cidrs=tuple(f"10.{n}.{m}.0/25" for m in range(99))) for n in range(100)
    ]
    with pytest.raises(AgentError) as caught:
        await firewall.ensure(agent, document(1, *staggered))
    assert caught.value.code == "firewall.too_large"


async def test_only_flows_that_are_no_longer_allowed_end(agent):
    await nic.ensure(agent, NIC)
    await firewall.ensure_policy(agent, policy(1))
    await firewall.ensure(agent, document(1, rule(port_first=22, port_last=23)))
    inward = [flow("192.0.2.9", NIC.ipv4, port) for port in (22, 23)]
    outward = flow(NIC.ipv4, "192.0.2.9", 443)
    agent.drivers.flows.present = [*inward, outward]

    result = (await firewall.ensure(agent, document(2, rule(port_first=23, port_last=23)))).result
    assert isinstance(result, Succeeded)
    assert result.observed["flows_ended"] == 1
    assert agent.drivers.flows.present == [inward[1], outward]
    assert agent.drivers.rules.table.sets["s_revoked4"] == {f"{NIC.ipv4} . 192.0.2.9 . 6 . 22 . 40000": ""}

    await firewall.ensure(agent, document(3, rule(port_first=23, port_last=23), rule(direction="egress", action="deny")))
    assert agent.drivers.flows.present == [inward[1]]
    await firewall.purge(agent, Purge(id="fw_1", generation=Generation(epoch=1, number=4)))
    assert agent.drivers.flows.present == []


async def test_a_policy_that_is_not_enforced_filters_nothing(agent):
    await nic.ensure(agent, NIC)
    await firewall.ensure(agent, document(1, rule()))
    await firewall.ensure_policy(agent, policy(1, is_enforced=False))
    assert agent.drivers.rules.table is None
    seen = (await firewall.observe(agent, Subject(id="fw_1"))).object
    assert (seen.state, seen.detail["enforced"]) == ("present", False)

    await firewall.ensure_policy(agent, policy(2))
    assert f'"bp{NIC.id[-12:]}"' in agent.drivers.rules.table.sets["m_in"]
    await firewall.ensure_policy(agent, policy(3, is_enforced=False))
    assert agent.drivers.rules.table is None


async def test_a_new_agent_takes_up_what_the_documents_say(agent, tmp_path):
    await nic.ensure(agent, NIC)
    await firewall.ensure_policy(agent, policy(1))
    await firewall.ensure(agent, document(1, rule(port_first=22, port_last=22)))
    written = agent.drivers.rules.table

    again = await open_agent(Paths.under(tmp_path), HostConfig(), fake_drivers(), version="test")
    await rules.start(again)
    assert again.drivers.rules.table == written
    await again.jobs.close()


async def test_a_write_that_failed_is_seen_and_made_good(agent):
    await nic.ensure(agent, NIC)
    await firewall.ensure_policy(agent, policy(1))
    refused = AgentError("rules.refused", "no room")
    for point in ("rules.change", "rules.apply"):
        agent.drivers.rules.faults.fail(point, refused)
    assert (await firewall.ensure(agent, document(1, rule()))).result.kind == "failed"
    assert (await firewall.observe(agent, Subject(id="fw_1"))).object.state == "different"

    await agent.rules.repair()
    assert (await firewall.observe(agent, Subject(id="fw_1"))).object.state == "present"
    assert "s_ia4_fw_1" in agent.drivers.rules.table.sets
