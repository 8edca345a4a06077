"""What each kind of health check costs the agent that makes it: `python -m tests.bench.loadbalancer_probes`.

CPU of the checking thread alone, medians of turns; who answers is another thread. So it repeats on a busy machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hostagent.probes.attempt import attempt
from hostagent.probes.capacity import SHARE_OF_A_CORE, capacity_per_second
from hostagent.protocol.network import ProbeWanted
from tests.agent.test_probes import answering, health, make_certificate, serving

WELL = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
PROBES = {
    "tcp": ProbeWanted(kind="tcp"),
    "http": ProbeWanted(kind="http", expected_body="ok"),
    "https": ProbeWanted(kind="https"),
    "grpc": ProbeWanted(kind="grpc"),
}
TURNS, BATCH = 9, 40


@contextlib.contextmanager
def backends() -> Iterator[dict[str, int]]:
    """A port for each kind, served by a thread."""
    ports: dict[str, int] = {}
    is_up, loop, end = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve(directory: Path) -> None:
        context, _ = make_certificate(directory)
        async with (
            serving(answering(WELL)) as http,
            serving(answering(WELL), context=context) as https,
            serving(health()) as grpc,
        ):
            ports.update(tcp=http, http=http, https=https, grpc=grpc)
            is_up.set()
            await end.wait()

    with tempfile.TemporaryDirectory() as directory:
        thread = threading.Thread(target=lambda: loop.run_until_complete(serve(Path(directory))))
        thread.start()
        assert is_up.wait(10)
        try:
            yield ports
        finally:
            loop.call_soon_threadsafe(end.set)
            thread.join()
            loop.close()


async def costs_us(ports: dict[str, int]) -> dict[str, float]:
    """CPU of an attempt by kind."""
    found: dict[str, list[float]] = {kind: [] for kind in PROBES}
    for kind, probe in PROBES.items():
        assert await attempt(replace(probe, timeout_ms=5000), "127.0.0.1", ports[kind]) == "", kind
    for _ in range(TURNS):
        for kind, probe in PROBES.items():
            started = time.thread_time()
            for _ in range(BATCH):
                await attempt(replace(probe, timeout_ms=5000), "127.0.0.1", ports[kind])
            found[kind].append((time.thread_time() - started) * 1e6 / BATCH)
    return {kind: statistics.median(values) for kind, values in found.items()}


def sustained() -> dict[str, float]:
    """Checks a second in a quarter of a core, by kind; `admitted`: TCP checks that an agent lets in on this machine."""

    async def measure(ports: dict[str, int]) -> dict[str, float]:
        costs = await costs_us(ports)
        return {kind: SHARE_OF_A_CORE * 1e6 / cost for kind, cost in costs.items()} | {"admitted": await capacity_per_second()}

    with backends() as ports:
        return asyncio.run(measure(ports))


if __name__ == "__main__":
    for name, number in sustained().items():
        print(f"{name:9} {number:8.0f} a second")
