"""Makes the host what its documents say, for ever: at start, every few seconds, and at once when something ended.

The one rule: the keeper looks, it never assumes; what differs is started again with a growing delay, and every change of
what it sees is one event.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from hostagent.lib import files
from hostagent.lib.process import Incarnation, open_pidfd
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Failed
from hostagent.protocol.wanted import Observed, VmWanted
from hostagent.serve.metrics import Metrics
from hostagent.verbs import address, host, lifecycle, vm
from hostagent.verbs.context import Agent
from hostagent.verbs.documents import Key
from hostagent.verbs.jobs import Job, Result

logger = logging.getLogger(__name__)
INTERVAL_SECONDS = 5.0
LONGEST_DELAY_SECONDS = 60.0
CALM_SECONDS = 60.0
UNNOTICED_SECONDS = 0.2
TOMBSTONE_CHECK_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class Patience:
    """How long to wait before the next try: 0, 1, 2, 4 … 60 s, forgotten after a minute of calm."""

    tries: int = 0
    not_before: float = 0.0
    settled_since: float | None = None

    def tried(self, now: float) -> None:
        delay = min(2.0 ** max(self.tries - 1, 0), LONGEST_DELAY_SECONDS) if self.tries else 0.0
        self.tries += 1
        self.not_before = now + max(delay, 1.0)
        self.settled_since = None

    def settled(self, now: float) -> None:
        self.settled_since = self.settled_since if self.settled_since is not None else now
        if now - self.settled_since >= CALM_SECONDS:
            self.tries, self.not_before = 0, 0.0


class Keeper:
    def __init__(self, agent: Agent, metrics: Metrics, *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._agent = agent
        self._metrics = metrics
        self._interval_seconds = interval_seconds
        self._seen: dict[Key, Observed | None] = {}
        self._patience: dict[Key, Patience] = {}
        self._dirty: set[Key] = set()
        self._news = asyncio.Event()
        self._pidfds: dict[Key, tuple[Incarnation, int]] = {}
        self._tombstones_checked = 0.0
        self._has_seen_all = False
        agent.poke = self.poke
        agent.watch = self.watch
        agent.jobs.on_finish = self._job_finished
        agent.balancers.on_change = lambda service_id: self.poke(("loadbalancer", service_id))
        self._nics: dict[Key, tuple[str, ...]] = {}
        address.listen(agent)

    def poke(self, key: Key) -> None:
        self._dirty.add(key)
        self._news.set()

    def watch(self, key: Key, incarnation: Incarnation) -> None:
        """Look at `key` as soon as the process ends."""
        found = self._pidfds.get(key)
        if incarnation.pid == 0 or (found is not None and found[0] == incarnation):
            return
        self._unwatch(key)
        descriptor = open_pidfd(incarnation, self._agent.boot_id)
        if descriptor is None:  # ended, and its supervisor has not noticed yet
            asyncio.get_running_loop().call_later(UNNOTICED_SECONDS, self.poke, key)
            return
        self._pidfds[key] = (incarnation, descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._ended, key)

    async def run(self) -> None:
        self.note_boot()
        while True:
            await self.sweep()
            deadline = self._agent.monotonic() + self._interval_seconds
            while (left := deadline - self._agent.monotonic()) > 0:
                try:
                    async with asyncio.timeout(left):
                        await self._news.wait()
                except TimeoutError:
                    break
                self._news.clear()
                dirty, self._dirty = self._dirty, set()
                for key in dirty:
                    await self.look(key)

    def note_boot(self) -> None:
        """Emit `host.booted` when this is another boot than the one remembered."""
        path, boot_id = self._agent.paths.state / "boot.json", self._agent.boot_id
        try:
            last = json.loads(path.read_bytes())["boot_id"]
        except (OSError, ValueError, KeyError, TypeError):
            last = ""
        if last != boot_id:
            logger.info("a new boot: everything is started from its document")
            files.write_atomically(path, json.dumps({"boot_id": boot_id}).encode())
            self._agent.events.emit("host.booted", boot_id=boot_id)

    async def sweep(self) -> None:
        """Look at everything once."""
        documents = self._agent.documents
        for key in dict.fromkeys((*documents.ordered(), *documents.broken, *self._seen)):
            await self.look(key)
        self._has_seen_all = True
        self._agent.notices.is_ready = True
        if time.monotonic() - self._tombstones_checked > TOMBSTONE_CHECK_SECONDS:
            self._tombstones_checked = time.monotonic()
            documents.forget_old_tombstones(time.time())

    async def look(self, key: Key) -> None:
        """Observe one object, say what changed, and start what is missing. Survives whatever a driver raises."""
        kind = host.KINDS[key[0]]
        try:
            observed = await lifecycle.observe_one(self._agent, kind, key[1])
        except Exception as error:
            self._metrics.drifted[key] = f"cannot be observed: {error}"
            if not isinstance(error, AgentError):
                logger.exception("observing %s %s", *key)
            return
        self._report(key, observed)
        if key[0] == "vm":
            self._tell_balancers(key, is_running=observed is not None and observed.state == "running")
        document = self._agent.documents.get(*key)
        if document is None:
            self._forget(key)
            return
        if isinstance(document, VmWanted) and await self._is_fenced(document, observed):
            return
        now, patience = self._agent.monotonic(), self._patience.setdefault(key, Patience())
        if not self._agent.documents.is_purged(*key) and kind.is_settled(document, observed):
            patience.settled(now)
            self._metrics.drifted.pop(key, None)
            return
        self._metrics.drifted[key] = f"{observed.state if observed else 'absent'}, wanted at {document.generation}"
        if now >= patience.not_before:
            await self._start(key, kind, patience, now)

    async def _is_fenced(self, document: VmWanted, observed: Observed | None) -> bool:
        """End a movable machine whose grant is over, and look again when the present one will be."""
        grants, now = self._agent.grants, self._agent.monotonic()
        if document.home != "movable" or observed is None or observed.state != "running":
            return False
        if grants.holds(document.id, now):
            left = grants.until[document.id] - now
            asyncio.get_running_loop().call_later(left, self.poke, ("vm", document.id))
            return False
        if self._agent.jobs.current(("vm", document.id)) is not None:
            return False  # its end pokes us
        logger.warning("the grant of %s is over: it is ended here", document.id)
        async with self._agent.admission.hold(("vm", document.id)):
            await vm.KIND.fence(self._agent, document)
        self.poke(("vm", document.id))
        return True

    async def _start(self, key: Key, kind: lifecycle.Kind, patience: Patience, now: float) -> None:
        async with self._agent.admission.hold(key):
            document = self._agent.documents.get(*key)
            if document is None or self._agent.jobs.current(key) is not None:
                return
            patience.tried(now)
            self._metrics.restarts += 1
            grave = self._agent.documents.tombstone(*key)
            if grave is not None and self._agent.documents.is_purged(*key):
                lifecycle.start_purge(self._agent, kind, key[1], grave)
            else:
                lifecycle.start_ensure(self._agent, kind, document)

    def _report(self, key: Key, observed: Observed | None) -> None:
        """What is seen for the first time after a start is no change: a new log tells its readers to observe everything."""
        is_first, last = key not in self._seen and not self._has_seen_all, self._seen.get(key)
        self._seen[key] = observed
        self._metrics.states[key] = observed.state if observed else "absent"
        if is_first or last == observed:
            return
        body: dict[str, Any] = {"kind": key[0], "id": key[1], "state": observed.state if observed else "gone"}
        if observed is not None:
            body |= {"detail": observed.detail, "generation": codec.encode(observed.generation)}
        is_exit = key[0] == "vm" and last is not None and last.state == "running" and body["state"] != "running"
        self._agent.events.emit("vm.exited" if is_exit else f"{key[0]}.changed", **body)

    def _forget(self, key: Key) -> None:
        self._unwatch(key)
        self._patience.pop(key, None)
        self._metrics.drifted.pop(key, None)
        if key not in self._agent.documents.broken:
            self._seen.pop(key, None)
            self._metrics.states.pop(key, None)

    def _job_finished(self, job: Job, result: Result) -> None:
        if isinstance(result, Failed):
            logger.warning("%s %s %s failed: %s: %s", job.action, *job.key, result.code, result.message)
            self._metrics.drifted[job.key] = f"{result.code}: {result.message}"
        self.poke(job.key)

    def _tell_balancers(self, key: Key, *, is_running: bool) -> None:
        document = self._agent.documents.get(*key)
        if document is not None:
            self._nics[key] = tuple(nic.id for nic in document.nics)
        if is_running and isinstance(document, VmWanted) and vm.is_leaving(self._agent, document):
            return  # who stops it has told them
        nics = self._nics.get(key, ())
        self._agent.balancers.machine(nics, is_running=is_running)
        self._agent.notices.machine(nics, is_running=is_running)
        if document is None:
            self._nics.pop(key, None)

    def _ended(self, key: Key) -> None:
        if key[0] == "vm":  # before anything else: its flows wait
            self._tell_balancers(key, is_running=False)
        self._unwatch(key)
        self.poke(key)

    def _unwatch(self, key: Key) -> None:
        found = self._pidfds.pop(key, None)
        if found is not None:
            asyncio.get_running_loop().remove_reader(found[1])
            os.close(found[1])

    def close(self) -> None:
        for key in list(self._pidfds):
            self._unwatch(key)
