"""The whole host at once. The one rule: what no document knows is listed as `unknown` and never purged by itself."""

from __future__ import annotations

from typing import Any, cast

from hostagent.protocol.verbs import HostObserved, Nothing
from hostagent.protocol.wanted import Observed
from hostagent.verbs import image, lifecycle, network, nic, vm, volume
from hostagent.verbs.context import Agent

KINDS: dict[str, lifecycle.Kind] = {
    kind.name: kind for kind in (network.KIND, image.KIND, volume.KIND, nic.KIND, vm.KIND)
}  # in the order in which they depend on each other


async def observe(agent: Agent, body: Nothing) -> HostObserved:
    del body
    cursor = agent.events.cursor  # before looking: a change while we look is then an event after it
    objects: list[Observed] = []
    for name, kind in KINDS.items():
        ids = [key[1] for key in (*agent.documents.ordered(), *agent.documents.broken) if key[0] == name]
        for object_id in dict.fromkeys(ids):
            observed = await lifecycle.observe_one(agent, kind, object_id)
            if observed is not None:
                objects.append(observed)
        objects.extend(await unknown_objects(agent, kind, frozenset(ids)))
    return HostObserved(objects=tuple(objects), boot_id=agent.boot_id, agent_version=agent.version, cursor=cursor)


async def unknown_objects(agent: Agent, kind: lifecycle.Kind, known: frozenset[str]) -> list[Observed]:
    """Found on the host without a document."""
    name = cast("Any", kind.name)
    return [
        Observed(id=found, kind=name, generation=None, state="unknown")
        for found in await kind.found(agent)
        if found not in known
    ]
