"""Heartbeats and notices between hosts. The one rule: one document a host, named `notices`, says all of them."""

from __future__ import annotations

import ipaddress

from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import NoticesWanted
from hostagent.protocol.results import Outcome, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Observed, Purge
from hostagent.verbs import lifecycle
from hostagent.verbs.context import Agent
from hostagent.verbs.jobs import Job, Result

NOTICES = "notices"
KEY_BYTES = 32


class NoticesKind:
    name = NOTICES

    def check(self, agent: Agent, document: NoticesWanted) -> None:
        del agent
        if document.id != NOTICES:
            raise AgentError("notices.invalid", f"the document's id is always {NOTICES!r}", retryable=False)
        try:
            for peer in document.peers:
                ipaddress.ip_address(peer.address)
            short = [peer.host_id for peer in document.peers if len(bytes.fromhex(peer.key)) != KEY_BYTES]
        except ValueError as error:
            raise AgentError("notices.invalid", str(error), retryable=False) from error
        if short:
            raise AgentError("notices.invalid", f"the key of {short[0]} has not {KEY_BYTES} bytes", retryable=False)

    async def apply(self, agent: Agent, document: NoticesWanted, job: Job) -> Result:
        job.step = "listening"
        await agent.notices.take(document)
        return Succeeded(observed={"state": "present"})

    async def remove(self, agent: Agent, object_id: str, document: NoticesWanted | None) -> None:
        del object_id, document
        agent.notices.remove()

    async def observe(self, agent: Agent, object_id: str, document: NoticesWanted | None) -> Observed | None:
        del object_id
        if document is None or agent.notices.wanted != document or not agent.notices.is_bound:
            return None
        detail: dict[str, str | int | float | bool | None] = {
            f"heard:{name}": is_heard for name, is_heard in agent.notices.heard().items()
        }
        return Observed(id=NOTICES, kind="notices", generation=document.generation, state="present", detail=detail)

    def is_settled(self, document: NoticesWanted, observed: Observed | None) -> bool:
        del document
        return observed is not None

    async def found(self, agent: Agent) -> tuple[str, ...]:
        del agent
        return ()


KIND = NoticesKind()


async def ensure(agent: Agent, body: NoticesWanted) -> Outcome:
    return await lifecycle.ensure(agent, KIND, body)


async def purge(agent: Agent, body: Purge) -> Outcome:
    return await lifecycle.purge(agent, KIND, body)


async def observe(agent: Agent, body: Subject) -> ObjectObserved:
    return await lifecycle.observe(agent, KIND, body)
