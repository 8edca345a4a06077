"""Reserved addresses held by this host: one to one for a machine here, or as the VIP of a load balancer.

The one rule: the way to the machine is there before neighbours are told of the address, and flows of an address that goes, or
leads to another machine, are forgotten.
"""

from __future__ import annotations

import ipaddress

from hostagent.drivers.network.address_rules import WAYS, address_part, ways_part
from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import AddressWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

Detail = dict[str, str | int | float | bool | None]


class AddressKind:
    name = "address"

    def check(self, agent: Agent, document: AddressWanted) -> None:
        del agent
        try:
            given = [document.address, *filter(None, (document.private_address,))]
            found = [ipaddress.ip_address(text) for text in given]
        except ValueError as error:
            raise AgentError("address.invalid", str(error), retryable=False) from error
        if len({address.version for address in found}) != 1 or [str(address) for address in found] != given:
            raise AgentError("address.invalid", f"{' and '.join(given)} do not go together", retryable=False)

    async def apply(self, agent: Agent, document: AddressWanted, job: Job) -> Result:
        job.step = "rules"
        part = address_part(document)
        before = agent.rules.parts.get(part_name(document.id))
        await agent.rules.put({WAYS: ways(agent), part_name(document.id): part})
        if before is not None and before != part:
            await _forget(agent, document.address)
        job.step = "announcing"
        interface = await agent.drivers.addresses.apply(document.address, is_announced=document.announce == "arp")
        await agent.drivers.speaker.apply(_spoken(agent))
        return Succeeded(observed={"state": "present", "interface": interface})

    async def remove(self, agent: Agent, object_id: str, document: AddressWanted | None) -> None:
        await agent.drivers.speaker.apply(_spoken(agent, but=object_id))
        if document is not None:
            await agent.drivers.addresses.remove(document.address)
        await agent.rules.put({part_name(object_id): None})
        if document is not None:
            await _forget(agent, document.address)

    async def observe(self, agent: Agent, object_id: str, document: AddressWanted | None) -> Observed | None:
        if document is None:
            return None
        interface = await agent.drivers.addresses.held_on(document.address)
        has_rules = agent.rules.parts.get(part_name(object_id)) == address_part(document)
        is_spoken = await agent.drivers.speaker.is_up(_spoken(agent))
        state = "present" if interface and has_rules and is_spoken else "incomplete"
        detail: Detail = {"address": document.address, "interface": interface, "is_vip": not document.private_address}
        return Observed(id=object_id, kind="address", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: AddressWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """An address without a document cannot be told from one that somebody else put there."""
        del agent
        return ()


KIND = AddressKind()


async def ensure(agent: Agent, body: AddressWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


def part_name(address_id: str) -> str:
    return f"address/{address_id}"


def ways(agent: Agent) -> RulePart:
    policies = agent.documents.all("policy")
    return ways_part(policies[0].private_cidrs if policies else ())


def parts(agent: Agent) -> dict[str, RulePart]:
    """Nothing on a host without addresses and tunnels."""
    documents = agent.documents.all("address")
    if not documents and not agent.documents.all("tunnel"):
        return {}
    return {WAYS: ways(agent), **{part_name(document.id): address_part(document) for document in documents}}


def _spoken(agent: Agent, *, but: str = "") -> tuple[str, ...]:
    """What routers are told of by BGP."""
    found = [item for item in agent.documents.all("address") if item.announce == "bgp" and item.id != but]
    return tuple(sorted(item.address for item in found if not agent.documents.is_purged("address", item.id)))


async def _forget(agent: Agent, address: str) -> None:
    flows = agent.drivers.flows
    await flows.delete(await flows.flows(addresses=(address,)))
