"""Metrics of processes that have no listener of their own, shown by the API's /metrics.

Each answers on a UNIX socket in `<state_dir>/metrics` with its metrics as text; the API asks all of them when it is asked.
The one rule: series of another process carry the label `process`, and are gone when the process is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

PREFIX = "bedplate_"
_ASK_SECONDS = 2.0
_MAX_BYTES = 16 << 20
log = logging.getLogger(__name__)


@contextlib.contextmanager
def shown(state_dir: Path, role: str, registry: CollectorRegistry = REGISTRY) -> Iterator[None]:
    """Answer with this process's metrics until the end. Where no socket can be made the process works on without."""

    class Answer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.wfile.write(generate_latest(registry))

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    path = _directory(state_dir) / f"{role}-{socket.gethostname()[:16]}-{os.getpid()}"  # containers share a volume
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        server = Server(str(path), Answer)
    except OSError as error:
        log.warning("the metrics of this process are not shown: %s: %s", path, error)
        yield
        return
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        path.unlink(missing_ok=True)


async def gather(state_dir: Path, own: CollectorRegistry) -> bytes:
    """Our own metrics and those of every process that answers, each family once. Sockets of the dead are removed."""
    directory = _directory(state_dir)
    paths = await asyncio.to_thread(lambda: sorted(directory.iterdir()) if directory.is_dir() else [])
    texts = await asyncio.gather(*(_ask(path) for path in paths))
    families = {family.name: family for family in own.collect()}
    for path, text in zip(paths, texts, strict=True):
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIX):
                _take(families, family, path.name)
    return generate_latest(_Gathered(list(families.values())))


async def _ask(path: Path) -> str:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return (await _all(reader)).decode()
            finally:
                writer.close()
    except ConnectionRefusedError:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    except (OSError, TimeoutError, UnicodeDecodeError) as error:
        log.warning("no metrics from %s: %s", path.name, error)
    return ""


async def _all(reader: asyncio.StreamReader) -> bytes:
    content = bytearray()
    while (block := await reader.read(1 << 16)) and len(content) < _MAX_BYTES:
        content += block
    return bytes(content)


def _take(families: dict[str, Metric], family: Metric, process: str) -> None:
    into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    into.samples += [
        Sample(sample.name, {**sample.labels, "process": process}, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


class _Gathered(CollectorRegistry):
    """What was gathered, in the form that the text is made of."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _directory(state_dir: Path) -> Path:
    return state_dir / "metrics"
