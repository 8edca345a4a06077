"""The whole host at once. The one rule: what no document knows is listed as `unknown` and never purged by itself."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hostagent import version
from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import HostObserved, Nothing, Reboot, Uninstall
from hostagent.protocol.wanted import Observed
from hostagent.verbs import (
    address,
    edgeways,
    firewall,
    image,
    lifecycle,
    loadbalancer,
    network,
    nic,
    notices,
    snapshot,
    tunnel,
    vm,
    volume,
)
from hostagent.verbs.context import Agent

KINDS: dict[str, lifecycle.Kind] = {
    kind.name: kind
    for kind in (
        firewall.POLICY_KIND,
        firewall.KIND,
        tunnel.KIND,
        edgeways.KIND,
        network.KIND,
        image.KIND,
        volume.KIND,
        snapshot.KIND,
        nic.KIND,
        vm.KIND,
        loadbalancer.KIND,
        notices.KIND,
        address.KIND,
    )
}  # in the order in which they depend on each other


async def observe(agent: Agent, body: Nothing) -> HostObserved:
    del body
    cursor = agent.events.cursor  # before looking: a change while we look is then an event after it
    objects: list[Observed] = []
    for name, kind in KINDS.items():
        ids = [key[1] for key in (*agent.documents.ordered(), *agent.documents.broken) if key[0] == name]
        for object_id in dict.fromkeys(ids):
            observed = await _observe(agent, kind, object_id)
            if observed is not None:
                objects.append(observed)
        objects.extend(await unknown_objects(agent, kind, frozenset(ids)))
    return HostObserved(objects=tuple(objects), boot_id=agent.boot_id, agent_version=agent.version, cursor=cursor)


async def _observe(agent: Agent, kind: lifecycle.Kind, object_id: str) -> Observed | None:
    """One object that cannot be looked at (a damaged disk, a driver that is gone) does not hide all others."""
    try:
        return await lifecycle.observe_one(agent, kind, object_id)
    except AgentError as error:
        document = agent.documents.get(kind.name, object_id)
        generation = document.generation if document is not None else None
        detail: dict[str, str | int | float | bool | None] = {"reason": f"{error.code}: {error.message}"}
        name = cast("Any", kind.name)
        return Observed(id=object_id, kind=name, generation=generation, state="unobservable", detail=detail)


async def uninstall(agent: Agent, body: Uninstall) -> Nothing:
    """Starts the removal outside this process and answers; it ends this agent. Raises AgentError `host.other_machine`,
    `host.has_objects`, `host.not_installed` (none retryable).
    """
    if body.machine_id != agent.paths.machine_id.read_text(encoding="ascii").strip():
        raise AgentError("host.other_machine", "this is another host than the one meant", retryable=False)
    kept = [object_id for kind, object_id in agent.documents.ordered() if kind in ("vm", "volume", "snapshot")]
    if kept:
        raise AgentError("host.has_objects", f"{kept[0]} and {len(kept) - 1} more are still wanted here", retryable=False)
    archive = version.archive()
    if archive is None:
        raise AgentError("host.not_installed", "this agent runs from its sources", retryable=False)
    from hostagent.install.uninstall import detach

    await asyncio.to_thread(detach, agent.paths, archive)
    return Nothing()


async def reboot(agent: Agent, body: Reboot) -> Nothing:
    """Orderly, by the host's own systemd. Raises AgentError `host.other_machine`, `host.reboot_unsupported`."""
    if body.machine_id != agent.paths.machine_id.read_text(encoding="ascii").strip():
        raise AgentError("host.other_machine", "this is another host than the one meant", retryable=False)
    if body.boot_id != agent.boot_id:
        return Nothing()
    if agent.drivers.supervisor.traits.name != "systemd":
        raise AgentError("host.reboot_unsupported", "pid 1 is not systemd: reboot this host by hand", retryable=False)
    from hostagent.install.commands import command

    await asyncio.to_thread(command, "systemctl", "--no-block", "reboot")
    return Nothing()


async def unknown_objects(agent: Agent, kind: lifecycle.Kind, known: frozenset[str]) -> list[Observed]:
    """Found on the host without a document."""
    name = cast("Any", kind.name)
    return [
        Observed(id=found, kind=name, generation=None, state="unknown")
        for found in await kind.found(agent)
        if found not in known
    ]
