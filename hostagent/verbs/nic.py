"""Nics: links of machines. The one rule: a machine's document carries its own nics; `nic.ensure` is for links without one."""

from __future__ import annotations

from hostagent.drivers.network.protocol import LinkObserved, LinkPlan, interface_name, peer_name
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import NicWanted, Observed, Purge, VmWanted
from hostagent.verbs import firewall, lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result


class NicKind:
    name = "nic"

    def check(self, agent: Agent, document: NicWanted) -> None:
        del agent, document

    async def apply(self, agent: Agent, document: NicWanted, job: Job) -> Result:
        job.step = "link"
        seen = await link(agent, document)
        return Succeeded(observed={"state": "present", "interface": seen.interface})

    async def remove(self, agent: Agent, object_id: str, document: NicWanted | None) -> None:
        del document
        await agent.drivers.links.remove(interface_name(object_id))
        await firewall.dismiss(agent, (object_id,))

    async def observe(self, agent: Agent, object_id: str, document: NicWanted | None) -> Observed | None:
        if document is None:
            return None
        seen = await agent.drivers.links.observe(plan_of(agent, document))
        if seen is None:
            return None
        detail: dict[str, str | int | float | bool | None] = {"interface": seen.interface, "mtu_bytes": seen.mtu_bytes}
        state = "present" if seen.is_complete else "incomplete"
        return Observed(id=object_id, kind="nic", generation=document.generation, state=state, detail=detail)

    def is_settled(self, document: NicWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """Interfaces without any document, by their interface name: the nic's id cannot be told from it."""
        wanted = {interface_name(nic.id) for nic in agent.documents.all("nic")}
        wanted |= {interface_name(nic.id) for vm in agent.documents.all("vm") for nic in vm.nics}
        return tuple(name for name in await agent.drivers.links.interfaces() if name not in wanted)


KIND = NicKind()


async def ensure(agent: Agent, body: NicWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


async def link(agent: Agent, document: NicWanted) -> LinkObserved:
    await firewall.admit(agent, (document,))
    return await agent.drivers.links.apply(plan_of(agent, document))


def plan_of(agent: Agent, document: NicWanted) -> LinkPlan:
    """A tap, or what the machine that carries the nic takes, owned by that machine's uid."""
    user = _machine_of(agent, document.id)
    machine = agent.drivers.machines.get(user.driver) if user else None
    kind = machine.traits.nic_kind if machine else "tap"
    return LinkPlan(
        nic=document,
        kind=kind,
        interface=interface_name(document.id),
        peer=peer_name(document.id) if kind == "veth" else "",
        uid=agent.records.uid(user.id) if user else 0,
    )


def _machine_of(agent: Agent, nic_id: str) -> VmWanted | None:
    return next((vm for vm in agent.documents.all("vm") if any(nic.id == nic_id for nic in vm.nics)), None)
