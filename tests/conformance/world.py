"""A host whose agent filters, its machines and an outside: what tests of firewalls stand on. Packets are sent."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import Awaitable, Callable

from hostagent.protocol.network import FirewallMemberWanted, FirewallRuleWanted, FirewallWanted, PolicyWanted
from hostagent.protocol.results import Succeeded
from hostagent.protocol.wanted import Generation
from hostagent.verbs import firewall
from hostagent.verbs.context import Agent
from tests.conformance.netns import Machine, Place, make_machine

ANYWHERE = ("0.0.0.0/0", "::/0")
INFRASTRUCTURE = ("192.0.2.64/26", "2001:db8::1:0/112")
PRIVATE = ("10.0.0.0/8", "fd00::/8")
numbers = itertools.count(1)


class World:
    """One host with its agent, machines and an outside."""

    def __init__(self, agent: Agent, host: Place, outside: Place) -> None:
        self.agent = agent
        self.host = host
        self.outside = outside
        self.machines: list[Machine] = []

    async def machine(self, number: int, *, mtu_bytes: int = 1500) -> Machine:
        made = await make_machine(number, mtu_bytes=mtu_bytes)
        self.machines.append(made)
        await firewall.admit(self.agent, (made.nic,))
        return made

    async def policy(self, *, infrastructure: tuple[str, ...] = INFRASTRUCTURE) -> None:
        wanted = PolicyWanted(
            id="policy",
            generation=Generation(epoch=1, number=next(numbers)),
            infrastructure_cidrs=infrastructure,
            private_cidrs=PRIVATE,
            is_enforced=True,
        )
        assert isinstance((await firewall.ensure_policy(self.agent, wanted)).result, Succeeded)

    async def firewall(self, name: str, *chosen: FirewallRuleWanted, on: tuple[Machine, ...]) -> int:
        """How many flows that ended."""
        members = tuple(FirewallMemberWanted(nic_id=m.nic.id, ipv4=m.ipv4, ipv6=m.ipv6) for m in on)
        generation = Generation(epoch=1, number=next(numbers))
        document = FirewallWanted(id=name, generation=generation, rules=chosen, members=members)
        result = (await firewall.ensure(self.agent, document)).result
        assert isinstance(result, Succeeded), result
        return result.observed["flows_ended"]

    async def count(self, name: str) -> int:
        family = "arp" if name.startswith("a_") else "inet"
        listed = await self.agent.drivers.rules.read(f"list counter {family} bedplate {name}")
        found = re.search(r"packets (\d+)", listed)
        assert found is not None
        return int(found[1])


def rule(direction: str, action: str, protocol: str, cidrs: tuple[str, ...] = ANYWHERE, ports: tuple[int, int] = (0, 0)):
    return FirewallRuleWanted(
        direction=direction, action=action, protocol=protocol, cidrs=cidrs, port_first=ports[0], port_last=ports[1]
    )


def only(*places: Place) -> tuple[str, ...]:
    return tuple(f"{address}/{bits}" for place in places for address, bits in ((place.ipv4, 32), (place.ipv6, 128)))


def hears(receiver: socket.socket, *, seconds: float = 0.3) -> bytes | None:
    receiver.settimeout(seconds)
    with contextlib.suppress(TimeoutError):
        return receiver.recv(65_536)
    return None


def exchange(place: Place, listener: socket.socket, client: socket.socket) -> socket.socket:
    """The server's side of a connection over which a byte went both ways."""
    accepted, _ = listener.accept()
    place.sockets.append(accepted)
    accepted.settimeout(5)
    client.sendall(b"?")
    assert accepted.recv(1) == b"?"
    accepted.sendall(b"!")
    assert client.recv(1) == b"!"
    return accepted


async def settled(counted: Callable[[], Awaitable[int]], value: int, *, at_least: bool = False) -> None:
    """Frames are taken by the kernel in its own time."""
    async with asyncio.timeout(5):
        while (seen := await counted()) != value and not (at_least and seen >= value):
            await asyncio.sleep(0.01)
