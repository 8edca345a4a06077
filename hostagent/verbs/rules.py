"""The table of rules as this host's documents want it.

The one rule: after a start everything in the table comes from the documents again. Whoever puts parts while the agent runs
offers the same parts here, as a function of the agent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hostagent.drivers.network.protocol import RulePart
from hostagent.protocol.errors import AgentError
from hostagent.verbs import firewall, loadbalancer
from hostagent.verbs.context import Agent

Collector = Callable[[Agent], dict[str, RulePart]]
COLLECTORS: tuple[Collector, ...] = (firewall.parts, loadbalancer.parts)

logger = logging.getLogger(__name__)


def wanted(agent: Agent) -> dict[str, RulePart]:
    return {name: part for collect in COLLECTORS for name, part in collect(agent).items()}


async def start(agent: Agent) -> None:
    """Before anything else is started. A host whose rules cannot be written runs on, and says so; it is tried again."""
    firewall.load(agent)
    try:
        await agent.rules.start(wanted(agent))
    except AgentError as error:
        logger.warning("the table of rules cannot be written: %s", error)
