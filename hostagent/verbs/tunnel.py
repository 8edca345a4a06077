"""Tunnels to other hosts. The one rule: one document a host, named `tunnel`, says all of them; keys are made here and only
their public halves are told.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress

from hostagent.drivers.network.address_rules import WAYS
from hostagent.drivers.network.reach import (
    TunnelsObserved,
)
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import TunnelWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import address, lifecycle, network
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

TUNNEL = "tunnel"
KEY = (TUNNEL, TUNNEL)
KEY_BYTES = 32
Detail = dict[str, str | int | float | bool | None]


class TunnelKind:
    name = "tunnel"

    def check(self, agent: Agent, document: TunnelWanted) -> None:
        del agent
        if document.id != TUNNEL:
            raise _invalid(f"the document's id is always {TUNNEL!r}")
        slots = [interface.slot for interface in document.interfaces]
        if len(set(slots)) != len(slots) or any(peer.slot not in slots for peer in document.peers):
            raise _invalid("a slot is named twice, or has peers and no interface")
        try:
            for peer in document.peers:
                if len(base64.b64decode(peer.public_key, validate=True)) != KEY_BYTES:
                    raise _invalid(f"the key of {peer.host_id} is none")
                ipaddress.ip_address(peer.endpoint_address)
                for cidr in peer.allowed_cidrs:
                    ipaddress.ip_network(cidr)
            for address in document.addresses:
                ipaddress.ip_address(address)
        except (ValueError, binascii.Error) as error:
            raise _invalid(str(error)) from error

    async def apply(self, agent: Agent, document: TunnelWanted, job: Job) -> Result:
        job.step = "rules"
        await agent.rules.put({WAYS: address.ways(agent)})  # what comes out of a tunnel for the host itself is refused
        job.step = "tunnels"
        seen = await agent.drivers.tunnels.apply(document)
        self._watch(agent, seen)
        await network.apply_again(agent)  # routes go with the interface they lead into
        return Succeeded(observed={"state": _state(seen), **_detail(document, seen)})

    async def remove(self, agent: Agent, object_id: str, document: TunnelWanted | None) -> None:
        del object_id, document
        await agent.drivers.tunnels.remove()

    async def observe(self, agent: Agent, object_id: str, document: TunnelWanted | None) -> Observed | None:
        seen = await agent.drivers.tunnels.observe(document)
        if document is None:
            return Observed(id=TUNNEL, kind="tunnel", generation=None, state="unknown") if seen else None
        if seen is None:
            seen = TunnelsObserved(interfaces=())
            if document.interfaces:
                return None
        self._watch(agent, seen)
        detail = _detail(document, seen)
        if seen.differences:
            detail["differs"] = "; ".join(seen.differences[:5])
        return Observed(id=object_id, kind="tunnel", generation=document.generation, state=_state(seen), detail=detail)

    def is_settled(self, document: TunnelWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None and observed.state == "present"

    async def found(self, agent: Agent) -> tuple[str, ...]:
        return (TUNNEL,) if await agent.drivers.tunnels.observe(None) else ()

    def _watch(self, agent: Agent, seen: TunnelsObserved) -> None:
        """The end of a process that carries packets is noticed at once; of two slots in the first, the other by the clock."""
        for interface in seen.interfaces[:1]:
            if interface.incarnation is not None:
                agent.watch(KEY, interface.incarnation)


KIND = TunnelKind()


async def ensure(agent: Agent, body: TunnelWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)


def _state(seen: TunnelsObserved) -> str:
    return "different" if seen.differences else "present"


def _detail(document: TunnelWanted, seen: TunnelsObserved) -> Detail:
    """For each slot the public key, its generation, and the hosts that were heard lately."""
    generations = {interface.slot: interface.key_generation for interface in document.interfaces}
    detail: Detail = {}
    for interface in seen.interfaces:
        detail["driver"] = interface.driver
        detail[f"public_key_{interface.slot}"] = interface.public_key
        detail[f"key_generation_{interface.slot}"] = generations.get(interface.slot, 0)
        detail[f"heard_{interface.slot}"] = ",".join(interface.heard_host_ids)
    return detail


def _invalid(why: str) -> AgentError:
    return AgentError("tunnel.invalid", why, retryable=False)
