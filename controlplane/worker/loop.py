"""The event loop of a worker process, in a thread beside Celery's.

The one rule: other threads reach the loop only through `call_soon_threadsafe`; what they ask for is a hint.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvloop

from controlplane.kernel.registry import Registry
from controlplane.kernel.world import World
from controlplane.worker.engine import Engine, ShardsChanged

log = logging.getLogger(__name__)
OpenWorld = Callable[[], AbstractAsyncContextManager[World[Any]]]
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0


class EngineThread:
    """Runs an Engine in a loop of its own. `failed` tells why it ended by itself, when it did."""

    def __init__(self, open_world: OpenWorld, registry: Registry, *, on_shards: ShardsChanged | None = None) -> None:
        self._open_world = open_world
        self._registry = registry
        self._on_shards = on_shards
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine: Engine | None = None
        self._task: asyncio.Task[None] | None = None
        self.failed: BaseException | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Return when the engine serves; raises what kept it from starting."""
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise TimeoutError("the worker's event loop did not start")
        if self.failed is not None:
            raise self.failed

    def stop(self) -> None:
        """Give leases back and end; bounded."""
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(_STOP_SECONDS)

    # -- what tasks ask for ---------------------------------------------------------------------------------------------

    def advance(self, run_id: str) -> None:
        self._soon(lambda engine: engine.runner.submit(run_id))

    def sweep(self, shard: int) -> None:
        self._soon(lambda engine: engine.sweeper.hurry() if shard in engine.keeper.held else None)

    def reconcile(self, kind: str) -> None:
        self._soon(lambda engine: engine.look_at(kind))

    def _soon(self, call: Callable[[Engine], object]) -> None:
        if self._loop is not None and self._engine is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, the sweep of another goes on
                self._loop.call_soon_threadsafe(call, self._engine)

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failed = error
            log.critical("the engine ended: %s", error, exc_info=error)
            if self._ready.is_set():
                self.on_failure()
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        async with self._open_world() as world:
            self._engine = Engine(world, self._registry, on_shards=self._on_shards)
            self._ready.set()
            await self._engine.run()
