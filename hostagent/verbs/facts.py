"""What the host says of itself. The one rule: the facts are learned by `hostagent.facts`; here is only the verb."""

from __future__ import annotations

from hostagent.protocol.facts import HostFacts
from hostagent.protocol.verbs import Nothing
from hostagent.verbs.context import Agent


async def observe(agent: Agent, body: Nothing) -> HostFacts:
    del body
    return await agent.learn_facts()
