"""`python -m controlplane.gateway`: the gateway process. Answers from what it knows; starts even when the database is away."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import asyncpg
import uvicorn

from controlplane.gateway.app import Gateway
from controlplane.gateway.exchange import Means
from controlplane.gateway.keeper import Keeper
from controlplane.gateway.limit import Limiter
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.routing import Router
from controlplane.gateway.upstream import open_session
from controlplane.metering.journal import Journal
from controlplane.metering.landing import Lander
from controlplane.settings import Settings

log = logging.getLogger("controlplane.gateway")

_LAND_SECONDS = 0.5
_RETRY_SECONDS = 2.0
_DRAIN_SECONDS = 30
_BACKLOG = 2048
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway with its keeper and lander at work; on the way out the journal is landed once more."""
    mine = settings.gateway
    journal = Journal(settings.state_dir / "gateway" / mine.instance / "journal")
    keeper = Keeper(settings.database.url)
    session = open_session()
    means = Means(session=session, router=Router(), journal=journal, metrics=Metrics())
    limiter = Limiter(requests_per_minute=mine.requests_per_minute, tokens_per_minute=mine.tokens_per_minute)
    tasks = [
        asyncio.create_task(keeper.run(), name="keeper"),
        asyncio.create_task(land_for_ever(journal, mine.instance, settings.database.url), name="lander"),
        asyncio.create_task(sync_for_ever(journal, mine.journal_sync_ms / 1000), name="journal-sync"),
    ]
    for task in tasks:
        task.add_done_callback(_stop_for_want_of)
    try:
        await keeper.tried()
        yield Gateway(keeper=keeper, limiter=limiter, means=means, max_body_bytes=mine.max_body_bytes)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.close()
        with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            await _land_last(journal, mine.instance, settings.database.url)
        journal.shut()


def _stop_for_want_of(task: asyncio.Task[None]) -> None:
    """These run for ever: one that fails is a fault of ours, and a gateway that does not meter must not look well."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s failed: the gateway stops, to be started anew", task.get_name(), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


async def land_for_ever(journal: Journal, instance: str, database_url: str) -> None:
    """Land what is closed twice a second; with the database away, go on where it stopped when it is back."""
    lander = Lander(journal, instance)
    while True:
        try:
            connection = await asyncpg.connect(database_url, timeout=5, command_timeout=30)
            try:
                while True:
                    await lander.run_once(connection)
                    await asyncio.sleep(_LAND_SECONDS)
            finally:
                connection.terminate()
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            log.warning("usage waits in the journal: %s", error)
        await asyncio.sleep(_RETRY_SECONDS)


async def _land_last(journal: Journal, instance: str, database_url: str) -> None:
    connection = await asyncpg.connect(database_url, timeout=2, command_timeout=5)
    try:
        await Lander(journal, instance).run_once(connection)
    finally:
        connection.terminate()


async def sync_for_ever(journal: Journal, period_seconds: float) -> None:
    """Bound what a power cut may cost: fdatasync every period, in a thread; 0 = leave it to the kernel."""
    while period_seconds > 0:
        await asyncio.sleep(period_seconds)
        try:
            await asyncio.to_thread(journal.sync)
        except OSError:
            log.exception("cannot sync the usage journal")


def bind(listen: str) -> socket.socket:
    """A listening socket for `host:port`; port 0 takes any free one."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)


def refuse_plain_http(settings: Settings) -> None:
    """Plain HTTP is for loopback; elsewhere it must be asked for, and is shown."""
    host = settings.gateway.listen.rpartition(":")[0].strip("[]")
    if settings.gateway.tls.certificate is not None or host in _LOOPBACK:
        return
    if not settings.insecure_http:
        raise SystemExit(f"the gateway would speak plain HTTP on {host}: set a certificate, or BEDPLATE_INSECURE_HTTP=1")
    log.warning("the gateway speaks plain HTTP on %s", host)


@asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[tuple[Gateway, uvicorn.Server, str]]:
    """A gateway that answers on its address, its server, and its URL. Leaving waits until the server was told to stop."""
    listener = bind(settings.gateway.listen)
    tls = settings.gateway.tls
    async with running(settings) as gateway:
        config = uvicorn.Config(
            gateway,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ssl_certfile=tls.certificate,
            ssl_keyfile=tls.key,
        )
        host, port = listener.getsockname()[:2]
        url = f"{'https' if tls.certificate else 'http'}://{host if ':' not in host else f'[{host}]'}:{port}"
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
        try:
            yield gateway, server, url
            await serving
        finally:
            server.should_exit = True
            await serving


async def serve(settings: Settings) -> None:
    refuse_plain_http(settings)
    async with listening(settings) as (_, _, url):
        log.info("listening on %s", url)


def main() -> None:
    settings = Settings()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)  # uvicorn takes both while it serves, and raises them again after: we then tidy up
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not settings.database.url:
        raise SystemExit("the gateway needs BEDPLATE_DATABASE__URL")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(settings))


def _ignore(_number: int, _frame: object) -> None:
    """What is left to do on a signal when serving has ended: nothing."""


def _loop_factory():  # noqa: ANN202 - uvloop's own type
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
