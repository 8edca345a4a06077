"""Runs inside the engine's machine: llama.cpp's own server on a model file, until it is told to stop.

Only the standard library and the engine's module are here. The model is served under the id it is given.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve one model over OpenAI's HTTP API.")
    parser.add_argument("--model", required=True, help="the GGUF file")
    parser.add_argument("--served-model-id", required=True, help="the id in /v1/models and in answers")
    parser.add_argument("--host", action="append", help="address to listen on; may be given again")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--context", type=int, default=4096, help="tokens of context of one request")
    parser.add_argument("--parallel", type=int, default=2, help="requests served at the same time")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the machine has cores")
    arguments = parser.parse_args()

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    import xllamacpp  # pyright: ignore[reportMissingImports] - only in the engine's own tree

    threads = arguments.threads or len(os.sched_getaffinity(0))
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.model_alias = {arguments.served_model_id}
    params.hostnames = arguments.host or ["0.0.0.0"]
    params.port = arguments.port
    params.n_parallel = arguments.parallel
    params.n_ctx = arguments.context * arguments.parallel
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.endpoint_metrics = True
    params.ui = False
    server = xllamacpp.Server(params)
    print(f"serving {arguments.served_model_id} on {server.listening_address}", flush=True)
    stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
