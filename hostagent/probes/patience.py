"""A time-out that counts only time in which this process was there to see the answer.

The one rule: waiting is counted in turns of the event loop, not by the wall. A process that got no CPU for a second (a busy
host, a paused machine) finds the answer and the end of its wait at the same moment: its own absence is not the other's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

TURNS = 5


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after TURNS waits of a TURNS-th each: a pause of ours, however long, counts as one of them."""
    loop = asyncio.get_running_loop()
    left = TURNS

    def turn() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(seconds / TURNS, turn)
        else:
            limit.reschedule(loop.time())

    timer = loop.call_later(seconds / TURNS, turn)
    try:
        async with asyncio.timeout(None) as limit:
            yield
    finally:
        timer.cancel()
