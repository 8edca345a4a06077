"""Reserved addresses held by this host: one to one for a machine here, or as the VIP of a load balancer.

The one rule: the way to the machine is there before neighbours are told of the address, and flows of an address that goes, or
leads to another machine, are forgotten.

Of two hosts that both say to have an address, the one with a grant goes on and the other lets go: it was cut off, or came back
from a reboot, while the control plane gave the address to another. Without a rival the grant's end changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging

from hostagent.drivers.network.address_rules import WAYS, address_part, ways_part
from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import AddressWanted, BgpWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

logger = logging.getLogger(__name__)
Detail = dict[str, str | int | float | bool | None]
DEFEND_SECONDS = 1.0


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
        if self._is_yielded(agent, document):
            return Succeeded(observed={"state": "yielded", "interface": ""})
        agent.yielded.pop(document.id, None)
        if agent.taken.get(document.id) != document.generation:
            agent.taken.pop(document.id, None)
        job.step = "rules"
        part = address_part(document)
        before = agent.rules.parts.get(part_name(document.id))
        await agent.rules.put({WAYS: ways(agent), part_name(document.id): part})
        if before is not None and before != part:
            await _forget(agent, document.address)
        if document.standby_for and document.id not in agent.taken:
            if await agent.drivers.addresses.held_on(document.address):
                await agent.drivers.addresses.remove(document.address)
                await _forget(agent, document.address)
            return Succeeded(observed={"state": "standby", "interface": ""})
        job.step = "announcing"
        if await self._is_elsewhere(agent, document):
            agent.yielded[document.id] = document.generation
            return Succeeded(observed={"state": "yielded", "interface": ""})
        interface = await agent.drivers.addresses.apply(document.address, is_announced=document.announce == "arp")
        await agent.drivers.speaker.apply(_spoken(agent), _routers(agent))
        return Succeeded(observed={"state": "present", "interface": interface})

    async def remove(self, agent: Agent, object_id: str, document: AddressWanted | None) -> None:
        agent.yielded.pop(object_id, None)
        agent.taken.pop(object_id, None)
        agent.told.discard(object_id)
        await agent.drivers.speaker.apply(_spoken(agent, but=object_id), _routers(agent))
        if document is not None:
            await agent.drivers.addresses.remove(document.address)
        await agent.rules.put({part_name(object_id): None})
        if document is not None:
            await _forget(agent, document.address)

    async def observe(self, agent: Agent, object_id: str, document: AddressWanted | None) -> Observed | None:
        if document is None:
            return None
        interface = await agent.drivers.addresses.held_on(document.address)
        if document.announce == "arp" and interface:
            await agent.drivers.addresses.guard(document.address)
        has_rules = agent.rules.parts.get(part_name(object_id)) == address_part(document)
        is_spoken = await agent.drivers.speaker.is_up(_spoken(agent), _routers(agent))
        is_holding = not document.standby_for or document.id in agent.taken
        state = "taken" if document.standby_for and is_holding else "present" if is_holding else "standby"
        state = state if bool(interface) == is_holding and has_rules and is_spoken else "incomplete"
        state = "yielded" if self._is_yielded(agent, document) else state
        detail: Detail = {"address": document.address, "interface": interface, "is_vip": not document.private_address}
        return Observed(id=object_id, kind="address", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: AddressWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state in {"present", "yielded", "standby", "taken"}

    async def _is_elsewhere(self, agent: Agent, document: AddressWanted) -> bool:
        """Whether another host answers for it, when nobody said in this life that it is to be held here: as after a reboot."""
        if document.announce != "arp" or document.id in agent.told or agent.grants.holds(document.id, agent.monotonic()):
            return False
        addresses = agent.drivers.addresses
        return not await addresses.held_on(document.address) and await addresses.is_answered(document.address)

    def _is_yielded(self, agent: Agent, document: AddressWanted) -> bool:
        """Until it is told anew, or given a grant."""
        is_same = agent.yielded.get(document.id) == document.generation
        return is_same and not agent.grants.holds(document.id, agent.monotonic())

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """An address without a document cannot be told from one that somebody else put there."""
        del agent
        return ()


KIND = AddressKind()


def listen(agent: Agent) -> None:
    """Answer rivals from now on: defend what is granted, once a second at most, and let go of the rest."""
    defended: dict[str, float] = {}
    working: set[asyncio.Task[None]] = set()

    def heard(address: str) -> None:
        now = agent.monotonic()
        if now - defended.get(address, -DEFEND_SECONDS) < DEFEND_SECONDS:
            return
        defended[address] = now
        task = asyncio.get_running_loop().create_task(meet_rival(agent, address))
        working.add(task)
        task.add_done_callback(working.discard)

    agent.drivers.addresses.rivals.on_rival = heard


async def meet_rival(agent: Agent, address: str) -> None:
    """Another host says to have it: go on with a grant, let go without one."""
    found = [item for item in agent.documents.all("address") if item.address == address and item.announce == "arp"]
    for document in found:
        if agent.grants.holds(document.id, agent.monotonic()):
            logger.warning("another host says to have %s, which is granted to this one: told again", address)
            await agent.drivers.addresses.defend(address)
            continue
        logger.warning("another host says to have %s, and no grant is left for it here: let go", address)
        async with agent.admission.hold((KIND.name, document.id)):
            if document.standby_for:
                agent.taken.pop(document.id, None)
            else:
                agent.yielded[document.id] = document.generation
            await agent.drivers.addresses.remove(address)
            await _forget(agent, address)
        agent.poke((KIND.name, document.id))


async def ensure(agent: Agent, body: AddressWanted) -> Outcome:
    agent.told.add(body.id)
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


def _routers(agent: Agent) -> BgpWanted | None:
    policies = agent.documents.all("policy")
    return policies[0].bgp if policies else None


async def _forget(agent: Agent, address: str) -> None:
    flows = agent.drivers.flows
    await flows.delete(await flows.flows(addresses=(address,)))
