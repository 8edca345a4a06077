"""The API process. The one rule: plain HTTP is for loopback; elsewhere it must be asked for, and is said."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Generator

import asyncpg
import uvicorn
import uvloop

from controlplane.api import guard
from controlplane.api.app import create_app
from controlplane.api.call import Services
from controlplane.core.tls import TlsFiles
from controlplane.identity.service import MasterKeyWrong, check_master_key, ensure_operator_token
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.settings import Settings, TlsSettings

_log = logging.getLogger("bedplate.api")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DRAIN_SECONDS = 10
_KEEP_ALIVE_SECONDS = 75


class ListenerRefused(RuntimeError):
    """The process may not or cannot listen as it is told; the message says why."""


class Server(uvicorn.Server):
    """Ends event streams first when it stops, so that they do not hold up the end; a signal is a good end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        app = self.config.app
        services: Services = app.state.services  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
        await services.events.close()
        await super().shutdown(sockets)


def bind(listen: str) -> socket.socket:
    """A listening socket for `host:port`; port 0 takes any free one. Raises ListenerRefused."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not port.isdigit() or int(port) > 65535:
        raise ListenerRefused(f"cannot listen on {listen}: a port is a number from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=1024)
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
    """Raises ListenerRefused for plain HTTP on other addresses than loopback, unless it was asked for."""
    host = settings.api.listen.rpartition(":")[0].strip("[]")
    if settings.api.tls.certificate is not None or host in _LOOPBACK:
        return
    if not settings.insecure_http:
        raise ListenerRefused(
            f"the API would speak plain HTTP on {host or 'every address'}: "
            "set a certificate (bedplate cert init makes one), or BEDPLATE_INSECURE_HTTP=1"
        )
    _log.warning("the API speaks plain HTTP on %s: whoever listens there can read the tokens", host or "every address")


async def serve(settings: Settings, listener: socket.socket, tls: TlsFiles | None) -> None:
    """Serve until SIGINT or SIGTERM; open requests get ten seconds."""
    sealer = load_sealer(settings)
    publisher = CeleryPublisher(settings.redis.url)
    database = await Database.open(settings.database.url, pool_size=settings.database.pool_size, publisher=publisher)
    try:
        async with database.session() as session:
            await check_master_key(session, sealer)
            await ensure_operator_token(session, settings.state_dir)
        config = uvicorn.Config(
            create_app(settings, database, sealer=sealer),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ssl_context_factory=(lambda *_: tls.context) if tls is not None else None,
        )
        following = asyncio.create_task(tls.follow()) if tls is not None else None
        await Server(config).serve(sockets=[listener])
        if following is not None:
            following.cancel()
    finally:
        await database.close()
        publisher.close()


def main() -> int:
    """Exit code 0 after a signal, 1 when it cannot serve, with the reason on stderr."""
    guard.install()
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        refuse_plain_http(settings)
        tls = tls_files(settings.api.tls)
        listener = bind(settings.api.listen)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
            runner.run(serve(settings, listener, tls))
    except (ListenerRefused, KeyFileUnusable, MasterKeyWrong) as error:
        print(f"bedplate api: {error}", file=sys.stderr)
        return 1
    except (OSError, asyncpg.PostgresError) as error:
        print(f"bedplate api: the database does not answer: {error}", file=sys.stderr)
        return 1
    return 0
