"""`python -m controlplane.gateway`: the gateway process. Answers from what it knows; starts even when the database is away."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop

from controlplane.gateway.server import listening
from controlplane.listener import ListenerRefused
from controlplane.metering.journal import JournalInUse
from controlplane.settings import Settings

log = logging.getLogger("controlplane.gateway")


async def serve(settings: Settings) -> None:
    """Until SIGTERM or SIGINT; open requests get thirty seconds to end."""
    async with listening(settings) as (_, _, url):
        log.info("listening on %s", url)


def main() -> int:
    """Exit code 0 after a signal, 1 when it cannot serve, with the reason on stderr."""
    settings = Settings()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _ignore)  # uvicorn takes both while it serves, and raises them again after: we then tidy up
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not settings.database.url:
        print("bedplate gateway: it needs BEDPLATE_DATABASE__URL", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except (ListenerRefused, JournalInUse, OSError) as error:
        print(f"bedplate gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _ignore(_number: int, _frame: object) -> None:
    """What is left to do on a signal when serving has ended: nothing."""


if __name__ == "__main__":
    sys.exit(main())
