"""What a gateway process is made of: keeper, lander, journal, connections to replicas, and the server before them.

The one rule: what is started here ends here, in order: requests first, then the journal is landed once more, then it is shut.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import uvicorn

from controlplane.core.sealing import Sealer
from controlplane.gateway.app import Gateway
from controlplane.gateway.budget import Budgets
from controlplane.gateway.entry import Unseal
from controlplane.gateway.exchange import Means
from controlplane.gateway.keeper import Keeper
from controlplane.gateway.limit import Limiter
from controlplane.gateway.load import report_for_ever, take_back
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.routing import Router
from controlplane.gateway.shared import SharedLimits
from controlplane.gateway.upstream import open_session
from controlplane.gateway.waiting import WaitingRoom
from controlplane.keyfile import KeyFileUnusable, read_master_key
from controlplane.listener import Listener, open_listener
from controlplane.metering.journal import Journal
from controlplane.metering.landing import Lander
from controlplane.settings import Settings

log = logging.getLogger(__name__)

_LAND_SECONDS = 0.5
_RETRY_SECONDS = 2.0
_DRAIN_SECONDS = 30
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway with its keeper and lander at work; raises JournalInUse.

    Long, because what is started here ends here, in order.
    """
    mine, url = settings.gateway, settings.database.url
    directory = settings.state_dir / "gateway" / mine.instance / "journal"
    journal = Journal(directory, is_synced=mine.journal_sync_ms > 0)
    lander = Lander(journal, mine.instance)
    room = WaitingRoom(most_requests=mine.queue_requests, most_bytes=mine.queue_bytes)
    router = Router(room)
    shared = SharedLimits(settings.redis.url, mine.instance) if settings.redis.url else None
    limiter = Limiter(requests_per_minute=mine.requests_per_minute, tokens_per_minute=mine.tokens_per_minute, shared=shared)
    keeper = Keeper(
        url,
        instance=mine.instance,
        on_routes=router.follow,
        in_use=router.in_use,
        on_gateways=limiter.divide_by,
        unseal=_unsealer(settings),
    )
    session = open_session()
    budgets = Budgets(url, mine.instance, journal.open_segment)
    means = Means(session=session, router=router, limiter=limiter, budgets=budgets, journal=journal, metrics=Metrics())
    tasks = _started(
        keeper=keeper.run(),
        limits=limiter.run(),
        budgets=budgets.run(),
        lander=land_for_ever(lander, url),
        load=report_for_ever(router.book, router.traffic, url, mine.instance),
        journal_sync=sync_for_ever(journal, mine.journal_sync_ms / 1000),
    )
    try:
        await keeper.tried()
        yield Gateway(
            keeper=keeper,
            means=means,
            max_body_bytes=mine.max_body_bytes,
            max_upload_bytes=mine.max_upload_bytes,
            spool=directory.parent / "spool",
        )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await take_back(url, mine.instance)
        await limiter.close()
        await session.close()
        with suppress(*_AWAY):
            await land_once(lander, url)
            await budgets.close()
        journal.shut()


def _started(**work: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
    """What runs for ever beside the requests, by name."""
    tasks = [asyncio.create_task(one, name=name) for name, one in work.items()]
    for task in tasks:
        task.add_done_callback(_stop_for_want_of)
    return tasks


def _unsealer(settings: Settings) -> Unseal | None:
    """Opens the keys of providers; None where this process has no master key: then there are no providers here."""
    try:
        sealer = Sealer(read_master_key(settings))
    except KeyFileUnusable as error:
        log.info("no providers outside: %s", error)
        return None
    return lambda sealed, context: sealer.open(sealed, context=context)


def _stop_for_want_of(task: asyncio.Task[None]) -> None:
    """These run for ever: one that fails is a fault of ours, and a gateway that does not meter must not look well."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s failed: the gateway stops, to be started anew", task.get_name(), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


async def land_for_ever(lander: Lander, database_url: str) -> None:
    """Land what is closed twice a second; with the database away, go on where it stopped when it is back."""
    while True:
        try:
            connection = await asyncpg.connect(database_url, timeout=5, command_timeout=30)
            try:
                while True:
                    await lander.run_once(connection)
                    await asyncio.sleep(_LAND_SECONDS)
            finally:
                connection.terminate()
        except _AWAY as error:
            log.warning("usage waits in the journal: %s", error)
        await asyncio.sleep(_RETRY_SECONDS)


async def land_once(lander: Lander, database_url: str) -> None:
    connection = await asyncpg.connect(database_url, timeout=2, command_timeout=5)
    try:
        await lander.run_once(connection)
    finally:
        connection.terminate()


async def sync_for_ever(journal: Journal, period_seconds: float) -> None:
    """Bound what a power cut may cost: fdatasync every period, in a thread; 0 = leave it to the kernel."""
    while period_seconds > 0:
        await asyncio.sleep(period_seconds)
        try:
            await journal.sync()
        except OSError:
            log.exception("cannot sync the usage journal")


@asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[tuple[Gateway, uvicorn.Server, str]]:
    """A gateway that answers on its address, its server, and its URL. Leaving waits until the server was told to stop."""
    listener = open_listener(settings, "gateway")
    async with running(settings) as gateway, listener.followed():
        server = uvicorn.Server(_configuration(gateway, listener))
        serving = asyncio.create_task(server.serve(sockets=[listener.socket]), name="server")
        try:
            yield gateway, server, listener.url
            await serving
        finally:
            server.should_exit = True
            await serving


def _configuration(gateway: Any, listener: Listener) -> uvicorn.Config:
    return uvicorn.Config(
        gateway,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        ssl_context_factory=listener.context_factory,
    )
