"""Every verb by its name. The one rule: what stands here is all that a control plane can say to a host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import BODY
from hostagent.verbs.context import Agent

Verb = Callable[[Agent, Any], Awaitable[Any]]


@cache
def verbs() -> dict[str, Verb]:
    from hostagent.verbs import (
        address,
        edgeways,
        facts,
        firewall,
        grants,
        host,
        image,
        loadbalancer,
        network,
        nic,
        notices,
        snapshot,
        stream,
        tunnel,
        vm,
        volume,
    )

    table: dict[str, Verb] = {
        "facts.observe": facts.observe,
        "host.observe": host.observe,
        "host.reboot": host.reboot,
        "host.uninstall": host.uninstall,
        "stream.open": stream.open_stream,
        "traffic.observe": loadbalancer.traffic,
        "vm.grant": grants.grant,
        "volume.unlock": volume.unlock,
    }
    for module in (image, volume, snapshot, nic, network, vm, firewall, tunnel, address, loadbalancer, notices, edgeways):
        name = module.__name__.rpartition(".")[2]
        table |= {f"{name}.ensure": module.ensure, f"{name}.purge": module.purge, f"{name}.observe": module.observe}
    table |= {
        "policy.ensure": firewall.ensure_policy,
        "policy.purge": firewall.purge_policy,
        "policy.observe": firewall.observe_policy,
    }
    return table


async def answer(agent: Agent, request: Request) -> Answer:
    """Runs one verb. Never raises but for cancellation; `events.subscribe` belongs to the session."""
    verb = verbs().get(request.verb)
    if verb is None:
        unknown = AgentError("verb.unknown", f"this agent knows no verb {request.verb[:80]!r}", retryable=False)
        return Answer(id=request.id, error=unknown)
    try:
        body = codec.decode(BODY[request.verb], request.body)
        return Answer(id=request.id, body=codec.encode(await verb(agent, body)))
    except codec.DecodeError as error:
        invalid = AgentError("request.invalid", str(error), retryable=False, pointer=error.pointer)
        return Answer(id=request.id, error=invalid)
    except AgentError as error:
        return Answer(id=request.id, error=error)
