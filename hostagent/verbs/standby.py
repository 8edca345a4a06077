"""Reserved addresses for which this host stands by: taken from a dead holder without a word of the control plane.

The one rule: a holder's silence is not its death. Its address is taken only when nobody on the link answers for it, and kept
without a grant only as long as no other host says to have it (`hostagent.verbs.address`); the control plane confirms it later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import AddressWanted
from hostagent.verbs.context import Agent

logger = logging.getLogger(__name__)
KIND = "address"
LOOK_SECONDS = 1.0


async def adopt(agent: Agent) -> None:
    """What an earlier process took is taken still. Before anything is applied."""
    for document in _standby(agent):
        if await agent.drivers.addresses.held_on(document.address):
            agent.taken[document.id] = document.generation


async def stand_by(agent: Agent) -> None:
    """For ever: at once when a holder falls silent, and each second while it is not heard."""
    news = asyncio.Event()
    agent.notices.on_silence = lambda _host_id: news.set()
    while True:
        heard = agent.notices.heard()
        looks = [look(agent, document, is_heard=heard.get(document.standby_for, False)) for document in _standby(agent)]
        await asyncio.gather(*looks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await news.wait()
        news.clear()


async def look(agent: Agent, document: AddressWanted, *, is_heard: bool) -> None:
    """Take it from a holder that is dead; tell one that is heard again, so that one of the two lets go."""
    addresses = agent.drivers.addresses
    is_taken = document.id in agent.taken
    try:
        if is_heard and is_taken:
            await addresses.defend(document.address)
        elif not is_heard and not is_taken and not await addresses.is_answered(document.address):
            await _take(agent, document)
    except (AgentError, OSError) as error:
        logger.warning("standing by for %s: %s", document.address, error)


async def _take(agent: Agent, document: AddressWanted) -> None:
    key = (KIND, document.id)
    async with agent.admission.hold(key):
        is_same = agent.documents.get(*key) == document and not agent.documents.is_purged(*key)
        if not is_same or agent.jobs.current(key) is not None:
            return
        agent.taken[document.id] = document.generation
        await agent.drivers.addresses.apply(document.address, is_announced=True)
    logger.warning("%s is silent and nobody answers for %s: taken", document.standby_for, document.address)
    agent.poke(key)


def _standby(agent: Agent) -> list[AddressWanted]:
    return [item for item in agent.documents.all(KIND) if item.standby_for]
