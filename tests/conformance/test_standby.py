"""Standing by for an address of another host, by packets: taken from the dead, left to the living, given back when heard."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.lib.wait import until
from hostagent.protocol.network import AddressWanted
from hostagent.protocol.wanted import Generation
from hostagent.verbs import address, lifecycle, standby
from hostagent.verbs.context import Agent
from tests.conformance.test_addresses import (
    IPV4,
    IPV6,
    Outside,
    Place,
    agent_in,
    granted,
    has_heard,
    held,
    let_go,
    met,
    outside,
    state,
    wanted,
    where_is,
)
from tests.namespaces import inside

__all__ = ["outside"]


@pytest.mark.caps("root", "netns")
@pytest.mark.parametrize("text", [IPV4, IPV6])
async def test_who_stands_by_takes_it_from_the_dead_and_from_nobody_else(tmp_path: Path, outside: Outside, text: str):
    """The holder's agent is silent all the time: only its kernel's silence counts."""
    async with agent_in(outside.one, tmp_path) as one, agent_in(outside.two, tmp_path) as two:
        heard: dict[str, list[str]] = {"one": [], "two": []}
        for name, agent in (("one", one), ("two", two)):
            agent.drivers.addresses.rivals.on_rival = heard[name].append
        document = wanted(text)
        waiting = replace(document, standby_for="one")
        await held(outside.one, one, document)
        await held(outside.two, two, waiting)
        await looked(outside.two, two, waiting)
        assert (await state(outside.two, two, waiting), await where_is(outside, text)) == ("standby", "one")

        outside.one.run("ip", "link", "set", "out0", "down")
        began = time.monotonic()
        await looked(outside.two, two, waiting)
        print(f"taken_from_the_dead: {time.monotonic() - began:.2f} s")
        assert await state(outside.two, two, waiting) == "taken"
        assert await where_is(outside, text) == "two"
        await held(outside.two, two, waiting)  # said again, as now and then: it stays
        two.taken.clear()  # as by a restart of the agent
        with inside(outside.two.netns):
            await standby.adopt(two)
        assert await state(outside.two, two, waiting) == "taken"

        await _granted_holder_is_back(outside, one, two, waiting, heard)
        # the control plane gives it to the other: from now on it is granted there
        await let_go(outside.one, one, document)
        await held(outside.two, two, replace(document, generation=Generation(epoch=1, number=2)))
        assert (await state(outside.two, two, document), await where_is(outside, text)) == ("present", "two")
        await held(outside.two, two, replace(waiting, generation=Generation(epoch=1, number=3)))
        assert await state(outside.two, two, waiting) == "standby"


async def _granted_holder_is_back(
    outside: Outside, one: Agent, two: Agent, waiting: AddressWanted, heard: dict[str, list[str]]
) -> None:
    """Who took it tells, hears the defence and waits again."""
    text, document = waiting.address, replace(waiting, standby_for="")
    outside.one.run("ip", "link", "set", "out0", "up")
    outside.one.run("ip", "address", "replace", f"{text}/{128 if ':' in text else 32}", "dev", "out0", "nodad")
    await granted(one, waiting.id)
    await state(outside.one, one, document)  # the keeper's look, which listens anew after the link was down

    async def is_told() -> bool:
        with inside(outside.two.netns):
            await standby.look(two, waiting, is_heard=True)
        return text in heard["one"]

    assert await until(is_told, seconds=10)
    await met(outside.one, one, text)
    assert await has_heard(heard["two"], text)
    await met(outside.two, two, text)
    assert (await state(outside.one, one, document), await state(outside.two, two, waiting)) == ("present", "standby")
    assert await where_is(outside, text) == "one"


async def looked(place: Place, agent: Agent, document: AddressWanted) -> None:
    with inside(place.netns):
        await standby.look(agent, document, is_heard=False)


@pytest.mark.caps("root", "netns")
@pytest.mark.parametrize("text", [IPV4, IPV6])
async def test_who_comes_back_asks_before_it_tells(tmp_path: Path, outside: Outside, text: str):
    """After a reboot there is a document and no grant: what another host has by now is left there without a word."""
    async with agent_in(outside.one, tmp_path) as one, agent_in(outside.two, tmp_path) as two:
        heard: list[str] = []
        two.drivers.addresses.rivals.on_rival = heard.append
        document = wanted(text)
        await held(outside.two, two, document)
        two.drivers.addresses._stop(text)  # its repeats would be sent from whichever namespace we are in
        await one.documents.put("address", document)
        assert await applied(outside.one, one, document) == "yielded"
        assert (heard, await where_is(outside, text)) == ([], "two")

        await let_go(outside.two, two, document)
        one.yielded.clear()  # and at the next one nobody has it
        assert await applied(outside.one, one, document) == "present"
        assert await where_is(outside, text) == "one"


async def applied(place: Place, agent: Agent, document: AddressWanted) -> str:
    """As the keeper does it, unasked."""
    with inside(place.netns):
        await agent.jobs.wait(lifecycle.start_ensure(agent, address.KIND, document), 10)
    return await state(place, agent, document)
