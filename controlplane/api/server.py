"""The API process. The one rule: it reaches no host; what does is refused at its import."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Generator

import asyncpg
import uvicorn
import uvloop

from controlplane.api import guard
from controlplane.api.app import create_app
from controlplane.api.call import Services
from controlplane.api.certificate import CertificateKeeper
from controlplane.identity.service import MasterKeyWrong, check_master_key, ensure_first_user, ensure_operator_token
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.listener import Listener, ListenerRefused, open_listener
from controlplane.settings import Settings

_DRAIN_SECONDS = 10
_KEEP_ALIVE_SECONDS = 75


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


async def serve(settings: Settings, listener: Listener) -> None:
    """Serve until SIGINT or SIGTERM; open requests get ten seconds."""
    sealer = load_sealer(settings)
    publisher = CeleryPublisher(settings.redis.url)
    database = await Database.open(
        settings.database.url,
        pool_size=settings.database.pool_size,
        publisher=publisher,
        statement_seconds=settings.database.api_statement_seconds,
    )
    try:
        async with database.session() as session:
            await check_master_key(session, sealer)
            await ensure_operator_token(session, settings.state_dir)
            await ensure_first_user(session, settings.state_dir)
        app = create_app(settings, database, sealer=sealer)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ssl_context_factory=listener.context_factory,
        )
        keeper = CertificateKeeper(settings=settings, database=database, registry=app.state.registry)
        async with listener.followed(), keeper.at_work():
            await Server(config).serve(sockets=[listener.socket])
    finally:
        await database.close()
        publisher.close()


def main() -> int:
    """Exit code 0 after a signal, 1 when it cannot serve, with the reason on stderr."""
    guard.install()
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        listener = open_listener(settings, "api")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, contextlib.suppress(KeyboardInterrupt):
            runner.run(serve(settings, listener))
    except (ListenerRefused, KeyFileUnusable, MasterKeyWrong) as error:
        print(f"bedplate api: {error}", file=sys.stderr)
        return 1
    except (OSError, asyncpg.PostgresError) as error:
        print(f"bedplate api: the database does not answer: {error}", file=sys.stderr)
        return 1
    return 0
