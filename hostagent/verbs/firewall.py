"""Firewalls, and the policy that makes this host filter at all.

The one rule: what a change forbids ends at once. Flows that the rules before let in, and these do not, are refused by name and
then forgotten, so that neither end can carry them on.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from hostagent.drivers.network.conntrack import Flow
from hostagent.drivers.network.firewall import Parts
from hostagent.drivers.network.firewall_sets import LAST_PORT, MAX_BOXES, TCP, UDP, TooManyBoxes
from hostagent.drivers.network.firewall_table import firewall_boxes, revoked_key
from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import NicWanted, Observed, Purge
from hostagent.verbs import address, lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.documents import check_id
from hostagent.verbs.jobs import Job, Result

POLICY = "policy"


class FirewallKind:
    name = "firewall"

    def check(self, agent: Agent, document: FirewallWanted) -> None:
        del agent
        try:
            for rule in document.rules:
                _check_rule(rule)
            for member in document.members:
                check_id(member.nic_id)
                for address in filter(None, (member.ipv4, member.ipv6)):
                    ipaddress.ip_address(address)
        except ValueError as error:
            raise AgentError("firewall.invalid", str(error), retryable=False) from error
        try:
            firewall_boxes(document)
        except TooManyBoxes as error:
            message = f"the rules overlap in so many ways that they make over {MAX_BOXES} elements of sets"
            raise AgentError("firewall.too_large", message, retryable=False) from error

    async def apply(self, agent: Agent, document: FirewallWanted, job: Job) -> Result:
        job.step = "rules"
        change = agent.firewalls.set_firewall(document, document.id)
        await agent.rules.put(change.parts)
        ended = await revoke(agent, change.suspects)
        return Succeeded(observed={"state": "present", "flows_ended": ended})

    async def remove(self, agent: Agent, object_id: str, document: FirewallWanted | None) -> None:
        del document
        change = agent.firewalls.set_firewall(None, object_id)
        await agent.rules.put(change.parts)
        await revoke(agent, change.suspects)

    async def observe(self, agent: Agent, object_id: str, document: FirewallWanted | None) -> Observed | None:
        if document is None:
            return None
        detail: dict[str, str | int | float | bool | None] = {
            "rules": len(document.rules),
            "members": len(document.members),
            "enforced": agent.firewalls.policy is not None,
        }
        state = _state(agent, agent.firewalls.firewall(object_id) == document)
        return Observed(id=object_id, kind="firewall", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: FirewallWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """What no document knows is not in the table: it is written from documents alone."""
        del agent
        return ()


class PolicyKind:
    name = "policy"

    def check(self, agent: Agent, document: PolicyWanted) -> None:
        del agent
        if document.id != POLICY:
            raise AgentError("policy.invalid", f"the document's id is always {POLICY!r}", retryable=False)
        try:
            for cidr in (*document.infrastructure_cidrs, *document.private_cidrs):
                ipaddress.ip_network(cidr)
        except ValueError as error:
            raise AgentError("policy.invalid", str(error), retryable=False) from error

    async def apply(self, agent: Agent, document: PolicyWanted, job: Job) -> Result:
        job.step = "rules"
        is_new = agent.firewalls.policy is None
        change = agent.firewalls.set_policy(_enforced(document))
        ways = {address.WAYS: address.ways(agent)} if address.WAYS in agent.rules.parts else {}
        await agent.rules.put({**change.parts, **ways})
        for known in agent.documents.all("address"):
            if known.announce == "bgp":
                agent.poke(("address", known.id))  # routers may be others now
        # Before there was a policy a machine could reach the host itself: whatever machines opened must be opened again.
        ended = await (_forget_opened(agent) if is_new and document.is_enforced else revoke(agent, change.suspects))
        return Succeeded(observed={"state": "present", "flows_ended": ended})

    async def remove(self, agent: Agent, object_id: str, document: PolicyWanted | None) -> None:
        del object_id, document
        await agent.rules.put(agent.firewalls.set_policy(None).parts)

    async def observe(self, agent: Agent, object_id: str, document: PolicyWanted | None) -> Observed | None:
        if document is None:
            return None
        state = _state(agent, agent.firewalls.policy == _enforced(document))
        return Observed(id=object_id, kind="policy", generation=document.generation, state=state)

    def is_settled(self, document: PolicyWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        del agent
        return ()


KIND = FirewallKind()
POLICY_KIND = PolicyKind()


async def ensure(agent: Agent, body: FirewallWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def ensure_policy(agent: Agent, body: PolicyWanted) -> Outcome:
    return await lifecycle.ensure(agent, POLICY_KIND, body)


async def purge_policy(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, POLICY_KIND, body)


async def observe_policy(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, POLICY_KIND, body)


def load(agent: Agent) -> None:
    """Take up what the documents say, without writing anything."""
    for firewall in agent.documents.all("firewall"):
        agent.firewalls.set_firewall(firewall, firewall.id)
    for nic in (*agent.documents.all("nic"), *(nic for vm in agent.documents.all("vm") for nic in vm.nics)):
        agent.firewalls.set_nic(nic)
    policies = agent.documents.all("policy")
    agent.firewalls.set_policy(_enforced(policies[0]) if policies else None)


def parts(agent: Agent) -> dict[str, RulePart]:
    return agent.firewalls.parts()


async def admit(agent: Agent, nics: Iterable[NicWanted]) -> None:
    """These links may be used from now on, as their firewalls say. Before a machine starts."""
    changed: Parts = {}
    for nic in nics:
        changed |= agent.firewalls.set_nic(nic)
    await agent.rules.put(changed)


async def dismiss(agent: Agent, nic_ids: Iterable[str]) -> None:
    """These links are no more, nor any flow of their addresses: another machine may get them."""
    changed: Parts = {}
    addresses: dict[str, str] = {}
    for nic_id in nic_ids:
        addresses |= agent.firewalls.addresses((nic_id,))
        changed |= agent.firewalls.drop_nic(nic_id)
    await agent.rules.put(changed)
    if agent.firewalls.policy is not None:
        await agent.drivers.flows.delete(await agent.drivers.flows.flows(addresses=addresses))


async def revoke(agent: Agent, nic_ids: Iterable[str]) -> int:
    """End what these nics may no longer do; how many flows that were."""
    nics = agent.firewalls.addresses(nic_ids)
    if agent.firewalls.policy is None or not nics:
        return 0
    flows = await agent.drivers.flows.flows(addresses=nics)
    everyone = agent.firewalls.addresses(agent.firewalls.nic_ids())
    forbidden = [flow for flow in flows if not agent.firewalls.allows(flow, everyone)]
    if forbidden:
        await agent.rules.put_passing(_refusals(forbidden, everyone))
        await agent.drivers.flows.delete(forbidden)
    return len(forbidden)


async def _forget_opened(agent: Agent) -> int:
    nics = agent.firewalls.addresses(agent.firewalls.nic_ids())
    opened = [flow for flow in await agent.drivers.flows.flows(addresses=nics) if flow.original.source in nics]
    await agent.drivers.flows.delete(opened)
    return len(opened)


def _refusals(flows: Iterable[Flow], nics: dict[str, str]) -> dict[str, dict[str, str]]:
    """Elements by set: the two ends of each flow, seen from each nic. Without them the machine's next packet would open the
    flow again from its side.
    """
    found: dict[str, dict[str, str]] = {}
    for flow in flows:
        if flow.protocol not in (TCP, UDP):
            continue
        first = (flow.original.source, flow.original.source_port)
        last = (flow.reply.source, flow.reply.source_port)
        for near, far in ((first, last), (last, first)):
            if near[0] in nics:
                name, key = revoked_key(flow.protocol, near, far)
                found.setdefault(name, {})[key] = ""
    return found


def _check_rule(rule: FirewallRuleWanted) -> None:
    """Raises ValueError."""
    for cidr in rule.cidrs:
        ipaddress.ip_network(cidr)
    has_ports = bool(rule.port_first or rule.port_last)
    if has_ports and not 1 <= rule.port_first <= rule.port_last <= LAST_PORT:
        raise ValueError(f"ports {rule.port_first}–{rule.port_last} are no range")
    if has_ports and rule.protocol not in ("tcp", "udp"):
        raise ValueError(f"{rule.protocol} has no ports")


def _enforced(policy: PolicyWanted) -> PolicyWanted | None:
    return policy if policy.is_enforced else None


def _state(agent: Agent, is_known: bool) -> str:
    return "present" if is_known and agent.rules.is_intact else "different"
