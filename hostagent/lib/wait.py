"""Waiting for something outside to become true, with a deadline. The one rule: first pauses are short, later ones long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

FIRST_PAUSE_SECONDS = 0.01
LAST_PAUSE_SECONDS = 0.25


async def until(is_true: Callable[[], Awaitable[bool]], *, seconds: float) -> bool:
    """False when it was not true within `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    pause = FIRST_PAUSE_SECONDS
    while not await is_true():
        left = end - loop.time()
        if left <= 0:
            return False
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 1.5, LAST_PAUSE_SECONDS)
    return True
