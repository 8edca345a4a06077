"""Routes to machines on other hosts. The one rule: one document a host, named `routes`, replaces all of them at once."""

from __future__ import annotations

from hostagent.drivers.network.protocol import RoutePlan
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import NetworkWanted, Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

ROUTES = "routes"


class NetworkKind:
    name = "network"

    def check(self, agent: Agent, document: NetworkWanted) -> None:
        del agent
        if document.id != ROUTES:
            raise AgentError("network.invalid", f"the document's id is always {ROUTES!r}", retryable=False)

    async def apply(self, agent: Agent, document: NetworkWanted, job: Job) -> Result:
        job.step = "routes"
        seen = await agent.drivers.routes.apply(_plan(agent, document))
        return Succeeded(observed={"state": "present", "routes": len(seen.routes)})

    async def remove(self, agent: Agent, object_id: str, document: NetworkWanted | None) -> None:
        del object_id, document
        await agent.drivers.routes.remove()

    async def observe(self, agent: Agent, object_id: str, document: NetworkWanted | None) -> Observed | None:
        seen = await agent.drivers.routes.observe()
        if document is None:
            return Observed(id=ROUTES, kind="network", generation=None, state="unknown") if seen else None
        if seen is None and (document.routes or document.unreachable_cidrs):
            return None
        same = set(seen.routes if seen else ()) == set(document.routes)
        same = same and set(seen.unreachable_cidrs if seen else ()) == set(document.unreachable_cidrs)
        detail: dict[str, str | int | float | bool | None] = {"routes": len(seen.routes) if seen else 0}
        state = "present" if same else "different"
        return Observed(id=object_id, kind="network", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: NetworkWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return (ROUTES,) if await agent.drivers.routes.observe() else ()


KIND = NetworkKind()


async def apply_again(agent: Agent) -> None:
    """What a tunnel's interface took along when it went is put back as soon as it is there again."""
    document = agent.documents.get("network", ROUTES)
    if document is not None and any(route.slot for route in document.routes):
        await agent.drivers.routes.apply(_plan(agent, document))


def _plan(agent: Agent, document: NetworkWanted) -> RoutePlan:
    return RoutePlan(wanted=document, data_interface=agent.config.data_interface)


async def ensure(agent: Agent, body: NetworkWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)
