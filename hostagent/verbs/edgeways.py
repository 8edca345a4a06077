"""Ways by which clients' addresses are kept. The one rule: one document a host, named `edgeways`, says all of them; rules come
before the interfaces that they guard.
"""

from __future__ import annotations

import ipaddress

from hostagent.drivers.network.edgeway_rules import PART, edgeways_part
from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import EdgeWaysWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

EDGEWAYS = "edgeways"
LAST_NETWORK = (1 << 24) - 1


class EdgeWaysKind:
    name = EDGEWAYS

    def check(self, agent: Agent, document: EdgeWaysWanted) -> None:
        del agent
        if document.id != EDGEWAYS:
            raise _invalid(f"the document's id is always {EDGEWAYS!r}")
        networks = [way.network for way in document.inward] + [document.network] * bool(document.outward)
        if len(set(networks)) != len(networks) or not all(0 < number <= LAST_NETWORK for number in networks):
            raise _invalid("each edge has a number of its own, of at most 24 bits")
        try:
            for address in (document.address, *(way.address for way in (*document.inward, *document.outward))):
                ipaddress.IPv4Address(address)
            for address in (one for way in document.outward for one in way.destinations):
                ipaddress.ip_address(address)
            for address, _, port in (one for way in document.inward for one in way.accepts):
                ipaddress.ip_address(address)
                if not 0 < port < 1 << 16:
                    raise _invalid(f"{port} is no port")
        except ValueError as error:
            raise _invalid(str(error)) from error

    async def apply(self, agent: Agent, document: EdgeWaysWanted, job: Job) -> Result:
        job.step = "rules"
        await agent.rules.put({PART: edgeways_part(document, agent.drivers.ways.plan(document))})
        job.step = "ways"
        await agent.drivers.ways.apply(document)
        return Succeeded(observed={"state": "present"})

    async def remove(self, agent: Agent, object_id: str, document: EdgeWaysWanted | None) -> None:
        del object_id, document
        await agent.drivers.ways.remove()
        await agent.rules.put({PART: None})

    async def observe(self, agent: Agent, object_id: str, document: EdgeWaysWanted | None) -> Observed | None:
        if document is None:
            return None
        differences = await agent.drivers.ways.differences(document)
        if differences is None:
            return None
        has_rules = agent.rules.parts.get(PART) == edgeways_part(document, agent.drivers.ways.plan(document))
        state = "present" if has_rules and not differences else "different"
        detail: dict[str, str | int | float | bool | None] = {"differs": "; ".join(differences[:5])} if differences else {}
        return Observed(id=object_id, kind=EDGEWAYS, generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: EdgeWaysWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        del agent
        return ()


KIND = EdgeWaysKind()


async def ensure(agent: Agent, body: EdgeWaysWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


def parts(agent: Agent) -> dict[str, RulePart]:
    document = agent.documents.get(EDGEWAYS, EDGEWAYS)
    if document is None or agent.documents.is_purged(EDGEWAYS, EDGEWAYS):
        return {}
    return {PART: edgeways_part(document, agent.drivers.ways.plan(document))}


def _invalid(why: str) -> AgentError:
    return AgentError("edgeways.invalid", why, retryable=False)
