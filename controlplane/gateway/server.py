"""What a gateway process is made of: keeper, lander, journal, connections to replicas, and the server before them.

The one rule: what is started here ends here, in order: requests first, then the journal is landed once more, then it is shut.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import uvicorn

from controlplane.core.tls import TlsFiles
from controlplane.gateway.app import Gateway
from controlplane.gateway.exchange import Means
from controlplane.gateway.keeper import Keeper
from controlplane.gateway.limit import Limiter
from controlplane.gateway.metrics import Metrics
from controlplane.gateway.routing import Router
from controlplane.gateway.upstream import open_session
from controlplane.metering.journal import Journal
from controlplane.metering.landing import Lander
from controlplane.settings import Settings, TlsSettings

log = logging.getLogger(__name__)

_LAND_SECONDS = 0.5
_RETRY_SECONDS = 2.0
_DRAIN_SECONDS = 30
_BACKLOG = 2048
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


class ListenerRefused(RuntimeError):
    """The process may not or cannot listen as it is told; the message says why."""


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway with its keeper and lander at work; raises JournalInUse."""
    mine, url = settings.gateway, settings.database.url
    journal = Journal(settings.state_dir / "gateway" / mine.instance / "journal")
    lander = Lander(journal, mine.instance)
    keeper = Keeper(url)
    session = open_session()
    means = Means(session=session, router=Router(), journal=journal, metrics=Metrics())
    limiter = Limiter(requests_per_minute=mine.requests_per_minute, tokens_per_minute=mine.tokens_per_minute)
    tasks = [
        asyncio.create_task(keeper.run(), name="keeper"),
        asyncio.create_task(land_for_ever(lander, url), name="lander"),
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
        with suppress(*_AWAY):
            await land_once(lander, url)
        journal.shut()


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
            await asyncio.to_thread(journal.sync)
        except OSError:
            log.exception("cannot sync the usage journal")


def bind(listen: str) -> socket.socket:
    """A listening socket for `host:port`; port 0 takes any free one. Raises ListenerRefused."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or int(port) > 65535:
        raise ListenerRefused(f"cannot listen on {listen}: a port is a number from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenerRefused(f"cannot listen on {listen}: {error.strerror}") from error


def tls_files(settings: TlsSettings) -> TlsFiles | None:
    """The certificate files; None without. Raises ListenerRefused when they cannot be used."""
    if settings.certificate is None or settings.key is None:
        if settings.certificate is not settings.key:
            raise ListenerRefused("TLS needs both a certificate and a key")
        return None
    try:
        return TlsFiles(certificate=settings.certificate, key=settings.key)
    except (OSError, ssl.SSLError) as error:
        raise ListenerRefused(f"cannot use the certificate {settings.certificate}: {error}") from error


def refuse_plain_http(settings: Settings) -> None:
    """Plain HTTP is for loopback; elsewhere it must be asked for, and is said. Raises ListenerRefused."""
    host = settings.gateway.listen.rpartition(":")[0].strip("[]")
    if settings.gateway.tls.certificate is not None or host in _LOOPBACK:
        return
    if not settings.insecure_http:
        raise ListenerRefused(
            f"the gateway would speak plain HTTP on {host or 'every address'}: "
            "set a certificate (bedplate cert init makes one), or BEDPLATE_INSECURE_HTTP=1"
        )
    log.warning("the gateway speaks plain HTTP on %s: whoever listens there can read the keys", host or "every address")


@asynccontextmanager
async def listening(settings: Settings) -> AsyncIterator[tuple[Gateway, uvicorn.Server, str]]:
    """A gateway that answers on its address, its server, and its URL. Leaving waits until the server was told to stop."""
    refuse_plain_http(settings)
    tls = tls_files(settings.gateway.tls)
    listener = bind(settings.gateway.listen)
    async with running(settings) as gateway:
        server = uvicorn.Server(_configuration(gateway, tls))
        host, port = listener.getsockname()[:2]
        url = f"{'https' if tls else 'http'}://{host if ':' not in host else f'[{host}]'}:{port}"
        following = asyncio.create_task(tls.follow(), name="certificate") if tls is not None else None
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="server")
        try:
            yield gateway, server, url
            await serving
        finally:
            server.should_exit = True
            await serving
            if following is not None:
                following.cancel()


def _configuration(gateway: Any, tls: TlsFiles | None) -> uvicorn.Config:
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
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        ssl_context_factory=(lambda *_: tls.context) if tls is not None else None,
    )
