"""The clock: `python -m controlplane.worker.beat` sends `sweep(shard)` and `reconcile(kind)`, when a worker is there to hear.

The one rule: a missed beat costs latency only; workers sweep and reconcile by their own clocks too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import asyncpg
from celery import Celery

from controlplane.kernel import sql
from controlplane.kernel.publish import COMMON_QUEUE, RECONCILE, SWEEP, publishing_app, queue_of
from controlplane.kernel.reconcile import Reconciler
from controlplane.kernel.registry import Registry
from controlplane.models.run import SHARDS
from controlplane.settings import Settings

log = logging.getLogger(__name__)
BEAT_SECONDS = 15.0


async def is_anyone_present(database_url: str) -> bool:
    """Whether a worker is alive: messages that nobody reads would pile up."""
    connection = await asyncpg.connect(database_url)
    try:
        return bool(await connection.fetchval(sql.IS_ANYONE_PRESENT))
    finally:
        await connection.close()


def beat(app: Celery, kinds: list[str]) -> int:
    """Send one round; returns how many messages Redis took. Stops at the first that it does not take."""
    sent = 0
    rounds = [(SWEEP, shard, queue_of(shard)) for shard in range(SHARDS)]
    rounds += [(RECONCILE, kind, COMMON_QUEUE) for kind in kinds]
    for task, argument, queue in rounds:
        try:
            app.send_task(task, (argument,), queue=queue, retry=False, expires=BEAT_SECONDS, ignore_result=True)
        except Exception as error:  # noqa: BLE001 - whatever the client dies of, the next beat comes
            log.warning("Redis does not take messages: %s", error)
            break
        sent += 1
    return sent


async def run(settings: Settings) -> None:
    """Beat until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = publishing_app(settings.redis.url) if settings.redis.url else None
    kinds = [name for name, program in Registry.discover().programs.items() if issubclass(program, Reconciler)]
    log.info("beating every %.0f s for %d shards and %s", BEAT_SECONDS, SHARDS, ", ".join(kinds) or "no reconcilers")
    while not stop.is_set():
        try:
            if app is not None and await is_anyone_present(settings.database.url):
                await asyncio.to_thread(beat, app, kinds)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("PostgreSQL is away: %s", error)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), BEAT_SECONDS)


def main() -> int:
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run(settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
