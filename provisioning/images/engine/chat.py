"""Runs inside the engine's machine: llama.cpp's own server on a model file, until it is told to stop.

The one rule: nobody reaches the engine before it has loaded its model. It listens on loopback, where it registers its paths
while it already accepts connections; the address for others is opened when it is ready, and passes bytes on.
Only the standard library and the engine's module are here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any, cast
from urllib.parse import urlsplit

_LOOPBACK = "127.0.0.1"


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve one model over OpenAI's HTTP API.")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--served-model-id", required=True, help="the id in /v1/models and in answers")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--context", type=int, default=4096, help="tokens of context of one request")
    parser.add_argument("--parallel", type=int, default=2, help="requests served at the same time")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the machine has cores")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments))
    return 0


async def serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loading = loop.run_in_executor(None, load, arguments)
    done, _ = await asyncio.wait({loading, loop.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if loading not in done:
        os._exit(0)  # the engine cannot be told to stop loading
    engine = loading.result()
    place = urlsplit(engine.listening_address)
    listener = socket.create_server((arguments.host, arguments.port), backlog=512)
    server = await loop.create_server(lambda: Inside(_LOOPBACK, place.port or 0), sock=listener)
    host, port = listener.getsockname()[:2]
    print(f"serving {arguments.served_model_id} on http://{host}:{port}", flush=True)
    async with server:
        await stop.wait()


def load(arguments: argparse.Namespace) -> Any:
    """The engine with its model loaded; returns only then."""
    import xllamacpp  # pyright: ignore[reportMissingImports] - only in the engine's own tree

    threads = arguments.threads or len(os.sched_getaffinity(0))
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.model_alias = {arguments.served_model_id}
    params.hostnames = [_LOOPBACK]
    params.port = 0
    params.n_parallel = arguments.parallel
    params.n_ctx = arguments.context * arguments.parallel
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = True
    params.ui = False
    return xllamacpp.Server(params)


class Side(asyncio.Protocol):
    """One end of a connection; what arrives goes out at the other, no faster than that can take it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever leaves takes the other along: a client that goes away frees its slot."""
        if self.other is not None and self.other.transport is not None:
            if exc is None:
                self.other.transport.close()
            else:
                self.other.transport.abort()


class Inside(Side):
    """A client's end: reads nothing until the engine's end stands. (Some releases of Python read all the same; that waits.)"""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.place = (host, port)
        self.early = b""
        self.connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self.connecting = asyncio.get_running_loop().create_task(self.connect(self.transport))

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
        else:
            super().data_received(data)

    async def connect(self, transport: asyncio.Transport) -> None:
        far = Side()
        try:
            await asyncio.get_running_loop().create_connection(lambda: far, *self.place)
        except OSError:
            transport.abort()
            return
        self.other, far.other = far, self
        assert far.transport is not None
        if transport.is_closing():
            far.transport.abort()
            return
        far.transport.write(self.early)
        transport.resume_reading()


if __name__ == "__main__":
    sys.exit(main())
