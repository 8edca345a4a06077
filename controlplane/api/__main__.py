"""`python -m controlplane.api`: the API process.

The one rule: plain HTTP is for loopback; elsewhere it must be asked for, and is said.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys

import uvicorn

from controlplane.api.app import create_app
from controlplane.identity.service import ensure_operator_token
from controlplane.kernel.database import Database
from controlplane.kernel.publish import CeleryPublisher
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.settings import Settings

log = logging.getLogger("controlplane.api")

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_DRAIN_SECONDS = 10


def bind(listen: str) -> socket.socket:
    """A listening socket for `host:port`; port 0 takes any free one."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=1024)


def refuse_plain_http(settings: Settings) -> None:
    host = settings.api.listen.rpartition(":")[0].strip("[]")
    if settings.api.tls.certificate is not None or host in _LOOPBACK:
        return
    if not settings.insecure_http:
        raise SystemExit(f"the API would speak plain HTTP on {host}: set a certificate, or BEDPLATE_INSECURE_HTTP=1")
    log.warning("the API speaks plain HTTP on %s", host)


async def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open requests get ten seconds."""
    sealer = load_sealer(settings)
    publisher = CeleryPublisher(settings.redis.url)
    database = await Database.open(settings.database.url, pool_size=settings.database.pool_size, publisher=publisher)
    try:
        async with database.session() as session:
            await ensure_operator_token(session, settings.state_dir)
        app = create_app(settings, database, sealer=sealer)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            timeout_graceful_shutdown=_DRAIN_SECONDS,
            ssl_certfile=settings.api.tls.certificate,
            ssl_keyfile=settings.api.tls.key,
        )
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        publisher.close()
        await database.close()


def main() -> int:
    settings = Settings()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    refuse_plain_http(settings)
    try:
        listener = bind(settings.api.listen)
    except OSError as error:
        print(f"cannot listen on {settings.api.listen}: {error.strerror}", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner() as runner:
            runner.run(serve(settings, listener))
    except KeyFileUnusable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
