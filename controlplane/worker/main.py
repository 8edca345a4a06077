"""A worker process: an engine in a thread, and Celery telling it what may be due.

The one rule: Celery may come and go (Redis down, flushed, none at all); the engine does not notice.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

from celery import Celery, signals
from prometheus_client import start_http_server

from controlplane.kernel import exposition
from controlplane.kernel.publish import COMMON_QUEUE, queue_of
from controlplane.kernel.registry import Registry
from controlplane.settings import Settings
from controlplane.worker.celery_app import make_app
from controlplane.worker.loop import EngineThread
from controlplane.worker.tasks import register
from controlplane.worker.world import open_world

log = logging.getLogger(__name__)


class Queues:
    """Keeps Celery's consumer on the queues of the shards that the engine holds. Called from both threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: set[int] = set()
        self._consumer: Any = None

    def change(self, gained: set[int], lost: set[int]) -> None:
        with self._lock:
            self._wanted = (self._wanted | gained) - lost
            self._apply(gained, lost)

    def ready(self, consumer: Any) -> None:
        """Celery is connected (again)."""
        with self._lock:
            self._consumer = consumer
            self._apply(self._wanted, set())

    def _apply(self, gained: set[int], lost: set[int]) -> None:
        if self._consumer is None:
            return
        for shard in sorted(gained):
            self._consumer.call_soon(self._consumer.add_task_queue, queue_of(shard))
        for shard in sorted(lost):
            self._consumer.call_soon(self._consumer.cancel_task_queue, queue_of(shard))


def run(settings: Settings, registry: Registry | None = None) -> int:
    """Serve until SIGTERM or SIGINT."""
    queues = Queues()
    engine = EngineThread(lambda: open_world(settings), registry or Registry.discover(), on_shards=queues.change)
    engine.on_failure = lambda: os.kill(os.getpid(), signal.SIGTERM)
    if settings.worker.metrics_listen:
        host, _, port = settings.worker.metrics_listen.rpartition(":")
        start_http_server(int(port), host)
    engine.start()
    try:
        if settings.redis.url:
            _run_celery(settings, engine, queues)
        else:
            _wait_for_signal()
    finally:
        engine.stop()
    return 0 if engine.failed is None else 1


def _run_celery(settings: Settings, engine: EngineThread, queues: Queues) -> None:
    app = make_app(settings.redis.url)
    register(app, engine)

    def on_ready(sender: Any, **_: object) -> None:
        queues.ready(sender)

    signals.worker_ready.connect(on_ready, weak=False)
    try:
        _worker(app, settings).start()
    finally:
        signals.worker_ready.disconnect(on_ready)


def _worker(app: Celery, settings: Settings) -> Any:
    return app.Worker(
        pool="threads",
        concurrency=2,
        queues=[COMMON_QUEUE],
        hostname=f"bedplate-{os.getpid()}@%h",
        loglevel=settings.log_level,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )


def _wait_for_signal() -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    log.warning("there is no Redis: the sweep and NOTIFY do all")
    stop.wait()


def main() -> int:
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("celery.app.trace", "celery.worker.strategy", "celery.worker.consumer.consumer", "asyncssh"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with exposition.shown(settings.state_dir, "worker"):
        return run(settings)
