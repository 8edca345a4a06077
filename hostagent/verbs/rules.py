"""The table of rules as this host's documents want it.

The one rule: after a start everything in the table comes from the documents again. Whoever puts parts while the agent runs
offers the same parts here, as a function of the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from hostagent.drivers.network.protocol import RulePart
from hostagent.drivers.network.uplinks import find_uplinks
from hostagent.protocol.errors import AgentError
from hostagent.verbs import address, edgeways, firewall, loadbalancer
from hostagent.verbs.context import Agent

Collector = Callable[[Agent], dict[str, RulePart]]
COLLECTORS: tuple[Collector, ...] = (firewall.parts, loadbalancer.parts, address.parts, edgeways.parts)

LOOK_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 30.0

logger = logging.getLogger(__name__)


def wanted(agent: Agent) -> dict[str, RulePart]:
    return {name: part for collect in COLLECTORS for name, part in collect(agent).items()}


async def guard(agent: Agent) -> None:
    """For ever: whoever changes the table beside us is told of, and undone. A table that could not be written is tried again.

    Two programs that undo each other do so with growing pauses.
    """
    news = asyncio.Event()
    agent.rules.driver.on_news(news.set)
    pause = FIRST_PAUSE_SECONDS
    while True:
        news.clear()
        try:
            by = await agent.rules.check()
        except AgentError as error:
            logger.warning("the table of rules cannot be looked at: %s", error)
            by = None
        if by is not None:
            agent.rules.disturbances += 1
            agent.events.emit("rules.disturbed", by=by)
            logger.warning("%s changed the table of rules: it is written anew", by or "somebody")
        if agent.rules.is_intact:
            pause = FIRST_PAUSE_SECONDS
            await _wait(news, LOOK_SECONDS)
            continue
        try:
            await agent.rules.repair()
            agent.events.emit("rules.repaired")
        except AgentError as error:
            logger.warning("the table of rules cannot be written: %s", error)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def _wait(news: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


async def start(agent: Agent) -> None:
    """Before anything else is started. A host whose rules cannot be written runs on, and says so; it is tried again."""
    firewall.load(agent)
    agent.balancers.uplinks = await find_uplinks(agent.config)
    try:
        await agent.rules.start(wanted(agent))
    except AgentError as error:
        logger.warning("the table of rules cannot be written: %s", error)
