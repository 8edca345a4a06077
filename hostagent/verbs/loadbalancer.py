"""Load balancers of which this host is an edge. The one rule: what a document wants is put in the table before it is answered;
what its backends do is learnt afterwards, and changes the table without anybody asking.
"""

from __future__ import annotations

import ipaddress
from itertools import chain

from hostagent.drivers.network.balancer_buckets import BUCKETS
from hostagent.drivers.network.balancer_rules import class_of
from hostagent.drivers.network.balancer_service import targets_of
from hostagent.drivers.network.protocol import RulePart
from hostagent.probes.capacity import capacity_per_second
from hostagent.probes.prober import cost_per_second
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import LoadBalancerWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject, TrafficObserved
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

MAX_WEIGHT = 256


class LoadBalancerKind:
    name = "loadbalancer"

    def check(self, agent: Agent, document: LoadBalancerWanted) -> None:
        try:
            for address in chain(document.vips, *((b.ipv4, b.ipv6) for b in document.backends)):
                if address:
                    ipaddress.ip_address(address)
        except ValueError as error:
            raise _invalid(str(error)) from error
        ids = [backend.id for backend in document.backends]
        if len(ids) > BUCKETS or len(set(ids)) != len(ids):
            raise _invalid(f"at most {BUCKETS} backends, each once")
        if any(not 1 <= backend.weight <= MAX_WEIGHT for backend in document.backends):
            raise _invalid(f"weights are 1 to {MAX_WEIGHT}")
        mine = _tuples(document)
        for other in agent.documents.all("loadbalancer"):
            if other.id != document.id and (taken := mine & _tuples(other)):
                raise AgentError("loadbalancer.vip_taken", f"{other.id} has {min(taken)} already", retryable=True)

    async def apply(self, agent: Agent, document: LoadBalancerWanted, job: Job) -> Result:
        job.step = "rules"
        await agent.balancers.take(document)
        return Succeeded(observed={"state": "present"})

    async def remove(self, agent: Agent, object_id: str, document: LoadBalancerWanted | None) -> None:
        del document
        await agent.balancers.remove(object_id)

    async def observe(self, agent: Agent, object_id: str, document: LoadBalancerWanted | None) -> Observed | None:
        service = agent.balancers.services.get(object_id)
        if document is None or service is None:
            return None
        detail: dict[str, str | int | float | bool | None] = {
            "client_address": _client_address(document),
            "offload": bool(agent.balancers.uplinks) and not class_of(document),
            "brakes": service.health.brakes,
        }
        detail |= {f"up:{name}": word for name, word in service.words().items()}
        state = "present" if agent.balancers.is_written(document) else "different"
        return Observed(id=object_id, kind="loadbalancer", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: LoadBalancerWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """The table holds what documents say and nothing else."""
        del agent
        return ()


KIND = LoadBalancerKind()


async def ensure(agent: Agent, body: LoadBalancerWanted) -> Outcome:
    if agent.documents.get(KIND.name, body.id) != body:
        await _admit_probes(agent, body)
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def traffic(agent: Agent, body: Subject) -> TrafficObserved:
    return TrafficObserved(backends=await agent.balancer_counts.traffic(body.id))


def parts(agent: Agent) -> dict[str, RulePart]:
    """What all load balancers have in the table, from their documents alone: at the agent's start."""
    kept = [wanted for wanted in agent.documents.all(KIND.name) if not agent.documents.is_purged(KIND.name, wanted.id)]
    return agent.balancers.restore(kept)


async def _admit_probes(agent: Agent, body: LoadBalancerWanted) -> None:
    """Raises AgentError `loadbalancer.too_many_probes` when this host could not make the checks besides the present ones."""
    wanted = cost_per_second(targets_of(body))
    if not wanted:
        return
    capacity = await capacity_per_second()
    present = agent.balancers.prober.cost_per_second(without_owner=body.id)
    if present + wanted > capacity:
        raise AgentError(
            "loadbalancer.too_many_probes",
            f"its checks cost {wanted:.0f} TCP probes a second, {present:.0f} are made, this host sustains {capacity:.0f}",
            retryable=False,
            wanted=round(wanted),
            present=round(present),
            sustained=round(capacity),
        )


def _client_address(document: LoadBalancerWanted) -> str:
    """`kept`, `masqueraded`, or `mixed` where it is kept for some backends only."""
    replies = {b.reply == "masqueraded" for b in document.backends if b.state != "removed"}
    if document.client_address == "masqueraded" or replies == {True}:
        return "masqueraded"
    return "mixed" if True in replies else "kept"


def _tuples(document: LoadBalancerWanted) -> set[str]:
    return {f"{vip} {one.protocol}/{one.port}" for vip in document.vips for one in document.listeners}


def _invalid(why: str) -> AgentError:
    return AgentError("loadbalancer.invalid", why, retryable=False)
