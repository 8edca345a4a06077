"""Which movable machines may run here and until when. The one rule: without a grant one is neither started nor left running.

An address that one host alone may hold is granted the same way, and judged less hard: without a grant it stays until
another host says to have it (`hostagent.verbs.address`), so that hosts serve on while the control plane is away.

A grant counts from a *stamp* that this host gave out earlier, never from when the grant arrived: one that was held up on its
way cannot last longer than its sender thinks. So who grants knows: at the latest GRANT_SECONDS after it heard the stamp, the
grant is over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostagent.lib import files
from hostagent.protocol.errors import AgentError
from hostagent.protocol.verbs import GRANT_SECONDS, Grant, Granted

if TYPE_CHECKING:
    from hostagent.lib.paths import Paths
    from hostagent.verbs.context import Agent


GRANTED_KINDS = ("vm", "address")


@dataclass(slots=True, kw_only=True)
class Grants:
    """Monotonic seconds of this boot. On a file system that a reboot empties, so that a restarted agent holds them still."""

    until: dict[str, float] = field(default_factory=dict)

    def holds(self, object_id: str, now: float) -> bool:
        return self.until.get(object_id, 0.0) > now

    def load(self, paths: Paths) -> None:
        try:
            kept = json.loads(paths.grants.read_bytes())
        except (OSError, ValueError):
            return
        if isinstance(kept, dict) and kept.get("boot_id") == paths.boot_id():
            self.until = {str(vm_id): float(until) for vm_id, until in kept["until"].items()}

    def save(self, paths: Paths) -> None:
        body = {"boot_id": paths.boot_id(), "until": self.until}
        files.write_atomically(paths.grants, json.dumps(body).encode())


async def grant(agent: Agent, body: Grant) -> Granted:
    """Let these run or be held until `seconds` after the stamp; answers a new stamp. Without a stamp: only that.

    Raises `vm.grant_stale` for a stamp of another boot or one that is over: ask for a new one.
    """
    now = agent.monotonic()
    if body.stamp:
        issued = _issued(agent, body.stamp)
        if issued is None or not now - GRANT_SECONDS < issued <= now:
            raise AgentError("vm.grant_stale", "the stamp is of another boot, or older than a grant lasts")
        alive = {vm_id: until for vm_id, until in agent.grants.until.items() if until > now}
        ends = issued + min(body.seconds, GRANT_SECONDS)
        alive |= {object_id: max(alive.get(object_id, 0.0), ends) for object_id in body.ids}
        news = [object_id for object_id in body.ids if not agent.grants.holds(object_id, now)]
        agent.grants.until = alive
        agent.grants.save(agent.paths)
        for object_id in news:
            for kind in GRANTED_KINDS:
                agent.poke((kind, object_id))
    return Granted(stamp=f"{agent.boot_id}:{int(now * 1000)}")


def _issued(agent: Agent, stamp: str) -> float | None:
    boot_id, _, milliseconds = stamp.rpartition(":")
    return int(milliseconds) / 1000 if boot_id == agent.boot_id and milliseconds.isdigit() else None
