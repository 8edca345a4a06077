"""The watch's process. The one rule: it keeps nothing; another one may take over at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable

import asyncpg
from prometheus_client import Gauge, start_http_server

from controlplane.core.clock import SystemClock
from controlplane.kernel import exposition
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher
from controlplane.keyfile import load_sealer
from controlplane.remote.access import RowDirectory
from controlplane.remote.link import HostLinks
from controlplane.remote.ssh import SshLinks
from controlplane.settings import Settings
from controlplane.watch.deliver import Delivery
from controlplane.watch.host import HostWatcher
from controlplane.watch.leases import Leases
from controlplane.watch.relay import Relay, own_socket

logger = logging.getLogger(__name__)
TICK_SECONDS = 2.5
HELD = Gauge("bedplate_watch_hosts", "Hosts whose event channels this watch holds.")


class Watch:
    """Keeps one HostWatcher for every host that is ours."""

    def __init__(self, leases: Leases, links: HostLinks, make: Callable[[str], HostWatcher]) -> None:
        self._leases = leases
        self._links = links
        self._make = make
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled; then everything is given back."""
        try:
            while True:
                try:
                    await self.tick()
                except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                    logger.warning("the leases were not renewed: %s", error)
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for host_id in list(self.tasks):
                await self._drop(host_id)
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._leases.leave()

    async def tick(self) -> None:
        wanted = await self._leases.tick()
        for host_id in set(self.tasks) - wanted:
            await self._drop(host_id)
        for host_id in wanted:
            task = self.tasks.get(host_id)
            if task is None or task.done():
                if task is not None and not task.cancelled() and task.exception() is not None:
                    logger.error("the watcher of %s failed", host_id, exc_info=task.exception())
                self.tasks[host_id] = asyncio.create_task(self._make(host_id).run(), name=f"watch {host_id}")
        HELD.set(len(self.tasks))

    async def _drop(self, host_id: str) -> None:
        task = self.tasks.pop(host_id)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self._links.forget(host_id)


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sealer, publisher = load_sealer(settings), CeleryPublisher(settings.redis.url)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(publisher.close)
        database = await Database.open(settings.database.url, pool_size=settings.database.pool_size, publisher=publisher)
        stack.push_async_callback(database.close)
        links = SshLinks(RowDirectory(database.pool, sealer))
        stack.push_async_callback(links.close)
        path = own_socket(settings.watch.socket or settings.state_dir / "watch.sock")
        relay = await Relay(links, sealer, SystemClock()).listen(path)
        stack.callback(path.unlink, missing_ok=True)
        stack.callback(relay.close)
        delivery = Delivery(database)
        name = f"{socket.gethostname()}:{os.getpid()}"
        watch = Watch(Leases(database, name, str(path)), links, lambda host_id: HostWatcher(host_id, links, delivery))
        running, stopping = asyncio.create_task(watch.run()), asyncio.create_task(stop.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        stopping.cancel()
        results = await asyncio.gather(running, stopping, return_exceptions=True)
    if not stop.is_set() and isinstance(results[0], BaseException):
        raise results[0]


def main() -> int:
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    if settings.watch.metrics_listen:
        host, _, port = settings.watch.metrics_listen.rpartition(":")
        start_http_server(int(port), host)
    with exposition.shown(settings.state_dir, "watch"):
        asyncio.run(serve(settings))
    return 0
