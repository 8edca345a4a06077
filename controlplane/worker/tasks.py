"""The three tasks. The one rule: a body hands its work to the event loop and returns."""

from __future__ import annotations

from celery import Celery

from controlplane.kernel.publish import ADVANCE, RECONCILE, SWEEP
from controlplane.worker.loop import EngineThread


def register(app: Celery, engine: EngineThread) -> None:
    """Bind the tasks of `app` to the engine of this process."""

    @app.task(name=ADVANCE)
    def advance(run_id: str) -> None:
        """A run may be due."""
        engine.advance(run_id)

    @app.task(name=SWEEP)
    def sweep(shard: int) -> None:
        """Something may be due in this shard."""
        engine.sweep(shard)

    @app.task(name=RECONCILE)
    def reconcile(kind: str) -> None:
        """Look whether every subject of this reconciler has its run."""
        engine.reconcile(kind)

    del advance, sweep, reconcile
