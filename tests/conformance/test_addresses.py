"""Address drivers, and reserved addresses by packets: moved from host to host, translated one to one, told by BGP."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import json
import re
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.drivers.network.announce import Announcer
from hostagent.drivers.network.bird import Bird
from hostagent.drivers.network.conntrack import Conntrack
from hostagent.drivers.network.fake import FakeAddresses
from hostagent.drivers.network.nft import NftProgram
from hostagent.drivers.network.reach import (
    AddressDriver,
)
from hostagent.drivers.registry import fake_drivers
from hostagent.lib.hostconfig import HostConfig
from hostagent.lib.paths import Paths
from hostagent.lib.wait import until
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import AddressWanted
from hostagent.protocol.results import Failed, Succeeded
from hostagent.protocol.verbs import Grant, Subject
from hostagent.protocol.wanted import Generation, Purge
from hostagent.verbs import address, grants, rules
from hostagent.verbs.context import Agent, open_agent
from tests.conformance.wires import frames, run
from tests.namespaces import inside

REAL = pytest.param("real", marks=pytest.mark.caps("root", "netns"))
ONE = Generation(epoch=1, number=1)
IPV4, IPV6 = "203.0.113.10", "2001:db8:113::10"


@pytest.fixture(params=["fake", REAL])
def addresses(request: pytest.FixtureRequest) -> AddressDriver:
    if request.param == "fake":
        return FakeAddresses()
    request.getfixturevalue("own_network")
    run("ip", "link", "add", "out0", "type", "veth", "peer", "name", "out1")
    run("ip", "link", "set", "out0", "up")
    run("ip", "link", "set", "out1", "up")
    run("ip", "address", "add", "203.0.113.1/24", "dev", "out0")
    run("ip", "address", "add", "2001:db8:113::1/64", "dev", "out0", "nodad")
    return Announcer()


@pytest.mark.parametrize("text", [IPV4, IPV6])
async def test_an_address_is_held_and_let_go(addresses: AddressDriver, text: str):
    assert await addresses.held_on(text) == ""
    await addresses.remove(text)
    name = await addresses.apply(text, is_announced=True)
    assert name
    assert await addresses.apply(text, is_announced=True) == name == await addresses.held_on(text)
    await addresses.remove(text)
    assert await addresses.held_on(text) == ""


class Place:
    """A namespace on the outer bridge."""

    def __init__(self, name: str, number: int) -> None:
        self.netns, self.number = name, number

    def run(self, *argv: str, check: bool = True) -> str:
        return run("ip", "netns", "exec", self.netns, *argv, check=check)


class Outside:
    """A bridge with a client and two hosts; each host has a machine (10.99.0.N) in a namespace behind it."""

    def __init__(self, tag: str) -> None:
        self.bridge = Place(f"bp-{tag}-br", 0)
        self.client, self.one, self.two = (Place(f"bp-{tag}-{number}", number) for number in (9, 1, 2))
        self.machine = Place(f"bp-{tag}-vm", 7)
        self.places = (self.bridge, self.client, self.one, self.two, self.machine)

    def make(self) -> None:
        for place in self.places:
            run("ip", "netns", "add", place.netns)
            place.run("ip", "link", "set", "lo", "up")
        self.bridge.run("ip", "link", "add", "br0", "type", "bridge")
        self.bridge.run("ip", "link", "set", "br0", "up")
        for place in (self.client, self.one, self.two):
            port = f"p{place.number}"
            self.bridge.run("ip", "link", "add", port, "type", "veth", "peer", "name", "out0", "netns", place.netns)
            self.bridge.run("ip", "link", "set", port, "master", "br0", "up")
            place.run("ip", "link", "set", "out0", "up")
            place.run("ip", "address", "add", f"203.0.113.{place.number}/24", "dev", "out0")
            place.run("ip", "address", "add", f"2001:db8:113::{place.number}/64", "dev", "out0", "nodad")
            place.run("sysctl", "-qw", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")

    def machine_on(self, host: Place) -> None:
        """The machine's one link leads to this host; it was on another before."""
        self.machine.run("ip", "link", "delete", "eth0", check=False)
        host.run("ip", "link", "add", "vm0", "type", "veth", "peer", "name", "eth0", "netns", self.machine.netns)
        for place, device, number in ((host, "vm0", 1), (self.machine, "eth0", 2)):
            place.run("ip", "link", "set", device, "up")
            place.run("ip", "address", "add", f"10.99.0.{number}/24", "dev", device)
            place.run("ip", "address", "add", f"fd00:99::{number}/64", "dev", device, "nodad")
        self.machine.run("ip", "route", "add", "default", "via", "10.99.0.1")
        self.machine.run("ip", "-6", "route", "add", "default", "via", "fd00:99::1")

    def remove(self) -> None:
        for place in self.places:
            run("ip", "netns", "delete", place.netns, check=False)


@pytest.fixture
def outside() -> Iterator[Outside]:
    made = Outside(uuid.uuid4().hex[:6])
    try:
        made.make()
        yield made
    finally:
        made.remove()


@contextlib.asynccontextmanager
async def agent_in(place: Place, root: Path) -> AsyncIterator[Agent]:
    with inside(place.netns):
        drivers = replace(fake_drivers(), rules=NftProgram(), flows=Conntrack(), addresses=Announcer("out0"))
        agent = await open_agent(Paths.under(root / place.netns), HostConfig(), drivers, version="test")
        agent.settle_seconds = 10.0
        await rules.start(agent)
    try:
        yield agent
    finally:
        await agent.jobs.close()
        agent.drivers.addresses.rivals.close()
        with inside(place.netns):
            await agent.rules.driver.close()
        agent.drivers.flows.close()


def wanted(text: str, private: str = "", number: int = 1) -> AddressWanted:
    ident = "addr_6" if ":" in text else "addr_4"
    generation = Generation(epoch=1, number=number)
    return AddressWanted(id=ident, generation=generation, address=text, private_address=private, announce="arp")


async def held(place: Place, agent: Agent, document: AddressWanted) -> None:
    with inside(place.netns):
        assert isinstance((await address.ensure(agent, document)).result, Succeeded)


async def let_go(place: Place, agent: Agent, document: AddressWanted) -> None:
    with inside(place.netns):
        outcome = await address.purge(agent, Purge(id=document.id, generation=document.generation))
        assert isinstance(outcome.result, Succeeded)


def longest_gap_ms(said: str) -> float:
    """Between two answers, by `ping -D`'s stamps."""
    stamps = [float(found) for found in re.findall(r"^\[(\d+\.\d+)\].* bytes from", said, re.MULTILINE)]
    return max((b - a for a, b in itertools.pairwise(stamps)), default=1e9) * 1000


@pytest.mark.caps("root", "netns")
async def test_an_address_is_moved_with_its_machine_in_under_a_second(tmp_path: Path, outside: Outside):
    async with agent_in(outside.one, tmp_path) as one, agent_in(outside.two, tmp_path) as two:
        await _moved(outside, one, two)


async def _moved(outside: Outside, one: Agent, two: Agent) -> None:
    outside.machine_on(outside.one)
    documents = [wanted(IPV4, "10.99.0.2"), wanted(IPV6, "fd00:99::2")]
    for document in documents:
        await held(outside.one, one, document)

    # one to one, in both directions
    for text in (IPV4, IPV6):
        outside.client.run("ping", "-c1", "-W5", text)
    for target, source in (("203.0.113.9", IPV4), ("2001:db8:113::9", IPV6)):
        with inside(outside.client.netns):
            wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
            wire.bind(("out0", 0))
            wire.setblocking(False)
        outside.machine.run("ping", "-c1", "-W5", target)
        passed = frames(wire)
        wire.close()
        assert any(ipaddress.ip_address(source).packed in frame for frame in passed)
        assert not any(ipaddress.ip_address("10.99.0.2" if "." in source else "fd00:99::2").packed in frame for frame in passed)

    pings = [
        await asyncio.create_subprocess_exec(
            *("ip", "netns", "exec", outside.client.netns, "ping", "-n", "-D", "-i", "0.02", "-W", "1", text),
            stdout=asyncio.subprocess.PIPE,
        )
        for text in (IPV4, IPV6)
    ]
    await asyncio.sleep(0.5)
    outside.machine_on(outside.two)
    for document in documents:
        await let_go(outside.one, one, document)
        await held(outside.two, two, document)
    await asyncio.sleep(0.5)
    for process in pings:
        process.send_signal(2)
        said = (await process.communicate())[0].decode()
        assert longest_gap_ms(said) < 1000, said[-400:]
    for text in (IPV4, IPV6):
        outside.client.run("ping", "-c1", "-W2", text)


@pytest.mark.caps("root", "netns")
@pytest.mark.parametrize("text", [IPV4, IPV6])
async def test_of_two_holders_the_one_with_a_grant_stays(tmp_path: Path, outside: Outside, text: str):
    """The first was cut off from the control plane, which gave the address to the second; later the first is booted again."""
    async with agent_in(outside.one, tmp_path) as one, agent_in(outside.two, tmp_path) as two:
        heard: dict[str, list[str]] = {"one": [], "two": []}
        for name, agent in (("one", one), ("two", two)):
            agent.drivers.addresses.rivals.on_rival = heard[name].append
        document = wanted(text)
        await held(outside.one, one, document)
        assert await where_is(outside, text) == "one"

        await held(outside.two, two, document)
        await granted(two, document.id)
        assert await has_heard(heard["one"], text)
        await met(outside.one, one, text)
        assert (await state(outside.one, one, document), await state(outside.two, two, document)) == ("yielded", "present")
        assert await where_is(outside, text) == "two"
        heard["two"].clear()

        one.yielded.clear()  # as by a reboot: it announces what its document says, and hears the defence
        heard["one"].clear()
        await held(outside.one, one, document)
        assert await has_heard(heard["two"], text)
        await met(outside.two, two, text)
        assert await has_heard(heard["one"], text)
        await met(outside.one, one, text)
        assert await where_is(outside, text) == "two"
        await held(outside.one, one, document)
        assert await state(outside.one, one, document) == "yielded", "the same word again changes nothing"

        with inside(outside.two.netns):
            await address.purge(two, Purge(id=document.id, generation=document.generation))
        again = replace(document, generation=Generation(epoch=1, number=2))
        await held(outside.one, one, again)
        assert await state(outside.one, one, again) == "present"
        assert await where_is(outside, text) == "one"


async def has_heard(heard: list[str], text: str) -> bool:
    async def is_heard() -> bool:
        return text in heard

    return await until(is_heard, seconds=5)


async def granted(agent: Agent, object_id: str) -> None:
    stamp = (await grants.grant(agent, Grant())).stamp
    await grants.grant(agent, Grant(ids=(object_id,), stamp=stamp, seconds=6))


async def met(place: Place, agent: Agent, text: str) -> None:
    with inside(place.netns):
        await address.meet_rival(agent, text)


async def state(place: Place, agent: Agent, document: AddressWanted) -> str:
    with inside(place.netns):
        seen = (await address.observe(agent, Subject(id=document.id))).object
    assert seen is not None
    return seen.state


async def where_is(outside: Outside, text: str) -> str:
    """By what the client's neighbour table says after it has spoken to the address."""
    await asyncio.to_thread(outside.client.run, "ping", "-c1", "-W3", text, check=False)
    said = outside.client.run("ip", "-j", "neighbour", "show", text)
    macs = {
        json.loads(place.run("ip", "-j", "link", "show", "out0"))[0]["address"]: place for place in (outside.one, outside.two)
    }
    place = macs[json.loads(said)[0]["lladdr"]]
    return "one" if place is outside.one else "two"


@pytest.mark.caps("root", "netns")
async def test_a_vip_gives_no_program_of_the_host_away(tmp_path: Path, outside: Outside):
    async with agent_in(outside.one, tmp_path) as one:
        await held(outside.one, one, wanted(IPV4))
        await _is_refused(outside, tmp_path)


async def _is_refused(outside: Outside, tmp_path: Path) -> None:
    argv = ("ip", "netns", "exec", outside.one.netns, "python3", "-m", "http.server", "8080", "--bind", "0.0.0.0")
    server = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, cwd=tmp_path
    )
    try:

        async def serves(text: str) -> bool:
            code = f"import socket; socket.create_connection(({text!r}, 8080), 2)"
            done = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", outside.client.netns, "python3", "-c", code), stderr=asyncio.subprocess.PIPE
            )
            return (await done.communicate())[1] == b""

        async def is_up() -> bool:
            return await serves("203.0.113.1")

        assert await until(is_up, seconds=10)
        assert not await serves(IPV4)
        outside.client.run("ping", "-c1", "-W5", IPV4)
    finally:
        server.kill()
        await server.wait()


@pytest.mark.caps("root", "netns")
@pytest.mark.usefixtures("own_network")
async def test_what_cannot_be_is_refused(paths: Paths):
    agent = await open_agent(paths, HostConfig(), fake_drivers(), version="test")
    for document in (wanted("hello"), wanted(IPV4, "fd00::1"), wanted("2001:DB8::1")):
        with pytest.raises(AgentError, match="address"):
            await address.ensure(agent, document)
    bird = Bird(fake_drivers().supervisor, paths)
    with pytest.raises(AgentError, match="BGP peers"):
        await bird.apply((IPV4,))
    failed = replace(agent.drivers, addresses=Announcer())
    agent.drivers = failed
    outcome = await address.ensure(agent, replace(wanted(IPV4), announce="arp"))
    assert isinstance(outcome.result, Failed)
    assert outcome.result.code == "address.no_interface"
