"""What a worker process runs, apart from Celery: runner, shard leases, sweep, LISTEN and the reconcilers' clock.

The one rule: this engine alone brings every run forward; Celery only tells it sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any

import asyncpg

from controlplane.kernel import sql
from controlplane.kernel.publish import Publisher
from controlplane.kernel.reconcile import Reconciler, keep_runs
from controlplane.kernel.registry import Registry
from controlplane.kernel.runner import Runner
from controlplane.kernel.shard import ShardKeeper
from controlplane.kernel.sweep import Sweeper
from controlplane.kernel.world import World

log = logging.getLogger(__name__)
_RECONCILE_SECONDS = 30.0
_LISTEN_SECONDS = 1.0

ShardsChanged = Callable[[set[int], set[int]], None]


def worker_name() -> str:
    """Unique for each process: a reused pid must not be taken for the worker that died."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


class LocalFirst:
    """A run of our own shards is submitted in this process; others are published."""

    def __init__(self, others: Publisher) -> None:
        self.others = others
        self.engine: Engine | None = None

    def due(self, run_id: str, shard: int) -> None:
        if self.engine is None or not self.engine.is_ours(run_id, shard):
            self.others.due(run_id, shard)


class Engine:
    """Made inside the event loop it runs in; `run` returns when cancelled, having given everything back."""

    def __init__(
        self, world: World[Any], registry: Registry, *, name: str | None = None, on_shards: ShardsChanged | None = None
    ) -> None:
        self.world = world
        self.registry = registry
        self.name = name or worker_name()
        self.runner = Runner(world=world, registry=registry, max_steps_in_flight=world.settings.worker.max_steps_in_flight)
        self.keeper = ShardKeeper(world.database, self.name, on_shards)
        self.sweeper = Sweeper(self.runner, self.keeper)
        self._looks: set[asyncio.Task[None]] = set()
        if isinstance(world.database.publisher, LocalFirst):
            world.database.publisher.engine = self

    def is_ours(self, run_id: str, shard: int) -> bool:
        """Submit a run of our shards here; False when the shard is not ours."""
        if shard not in self.keeper.held:
            return False
        self.runner.submit(run_id)
        return True

    async def run(self) -> None:
        log.info("worker %s serves %s", self.name, ", ".join(self.registry.programs) or "no programs")
        async with self.runner:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.keeper.run())
                    group.create_task(self.sweeper.run())
                    group.create_task(self._listen())
                    group.create_task(self._reconcile())
            finally:
                await self.runner.close()
                with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                    await self.keeper.leave()

    # -- NOTIFY, for when Redis is away ---------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Hear NOTIFY on a connection of our own; made anew when it breaks."""
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection = await asyncpg.connect(self.world.database.url)
                try:
                    broken = asyncio.Event()
                    connection.add_termination_listener(lambda _, broken=broken: broken.set())
                    await connection.add_listener(sql.RUN_DUE_CHANNEL, self._heard)
                    await broken.wait()
                finally:
                    await connection.close(timeout=1)
            await asyncio.sleep(_LISTEN_SECONDS)

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        shard, _, run_id = str(payload).partition(" ")
        if shard.isdigit():
            self.is_ours(run_id, int(shard))

    # -- the reconcilers' clock -----------------------------------------------------------------------------------------

    async def _reconcile(self) -> None:
        """Whoever holds shard 0 keeps every reconciler's runs; a message `reconcile(kind)` does it sooner."""
        while True:
            await asyncio.sleep(_RECONCILE_SECONDS if self.keeper.held else 1.0)
            if 0 in self.keeper.held:
                for program in self.registry.programs.values():
                    if issubclass(program, Reconciler):
                        await self.reconcile(program.name)

    def look_at(self, kind: str) -> None:
        """`reconcile`, in the background."""
        task = asyncio.create_task(self.reconcile(kind))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def reconcile(self, kind: str) -> None:
        """Make sure that the reconciler has a run for each of its subjects, and none besides."""
        program = self.registry.get(kind)
        if program is None or not issubclass(program, Reconciler):
            log.warning("there is no reconciler named %s", kind)
            return
        try:
            await keep_runs(self.world, program)
        except Exception:
            log.exception("the runs of reconciler %s were not looked after", kind)
