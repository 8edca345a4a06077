"""How many health checks this host can make. The one rule: it is measured here and now, and by CPU time, so that a busy moment
does not make a host look small.
"""

from __future__ import annotations

import asyncio
import socket
import time

from hostagent.probes.attempt import attempt
from hostagent.protocol.network import ProbeWanted

SHARE_OF_A_CORE = 0.25
_BATCHES, _BATCH = 4, 25
_PROBE = ProbeWanted(kind="tcp")


async def capacity_per_second() -> float:
    """TCP attempts a second that take SHARE_OF_A_CORE; takes some 40 ms. Accepting them is in the price."""
    loop = asyncio.get_running_loop()
    best = float("inf")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setblocking(False)
        server.bind(("127.0.0.1", 0))
        server.listen(_BATCH)
        port = server.getsockname()[1]
        for _ in range(_BATCHES):
            started = time.thread_time()
            for _ in range(_BATCH):
                await attempt(_PROBE, "127.0.0.1", port)
                flow, _ = await loop.sock_accept(server)
                flow.close()
            best = min(best, (time.thread_time() - started) / _BATCH)
    return SHARE_OF_A_CORE / best
