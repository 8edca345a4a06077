"""Runs inside the engine's machine: sentence embeddings by ONNX Runtime over OpenAI's `/v1/embeddings`, until it is stopped.

The one rule: the port opens when the model is loaded, so whoever can connect gets embeddings. Vectors are the mean over the
tokens of the last layer, of length one, as sentence-transformers make them. Only the standard library and the engine's
modules are here.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST_INPUTS = 2048
MOST_BODY_BYTES = 16 << 20
BATCH = 16
IDLE_SECONDS = 75.0


class Refused(Exception):
    """A request that is answered 4xx; `code` and `param` as OpenAI has them."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


@dataclass(frozen=True)
class Asked:
    texts: list[str] | list[list[int]]
    is_base64: bool


class Embedder:
    """One model; runs one batch at a time, which uses all threads that it has."""

    def __init__(self, model: str, tokenizer: str, *, context: int, threads: int) -> None:
        import numpy as np  # pyright: ignore[reportMissingImports] - only in the engine's own tree
        import onnxruntime  # pyright: ignore[reportMissingImports]
        import tokenizers  # pyright: ignore[reportMissingImports]

        self.np: Any = np
        self.tokenizer: Any = tokenizers.Tokenizer.from_file(tokenizer)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        options: Any = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        self.session: Any = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = [entry.name for entry in self.session.get_inputs()]
        self.context = context
        self.lock = threading.Lock()
        self.dimensions = len(self.embed([self.ids_of("warm")])[0])

    def ids_of(self, text: str | list[int]) -> list[int]:
        """The token ids with the model's marks around them. Raises Refused `context_length_exceeded`."""
        if isinstance(text, str):
            ids: list[int] = self.tokenizer.encode(text).ids
        else:
            if not all(0 <= number < self.tokenizer.get_vocab_size() for number in text):
                raise Refused("input names tokens that the model does not have", param="input")
            ids = self.tokenizer.post_process(self.tokenizer.encode("", add_special_tokens=False)).ids
            ids = [*ids[:1], *text, *ids[1:]]
        if len(ids) > self.context:
            words = f"This model's maximum context length is {self.context} tokens; an input has {len(ids)}."
            raise Refused(words, param="input", code="context_length_exceeded")
        return ids

    def embed(self, inputs: list[list[int]]) -> list[Any]:
        """A vector of length one for each input; similar lengths share a batch, so little is padding."""
        vectors: list[Any] = [None] * len(inputs)
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            for index, vector in zip(chosen, self._run([inputs[index] for index in chosen]), strict=True):
                vectors[index] = vector
        return vectors

    def _run(self, inputs: list[list[int]]) -> Any:
        np = self.np
        longest = max(len(ids) for ids in inputs)
        ids = np.zeros((len(inputs), longest), dtype=np.int64)
        mask = np.zeros((len(inputs), longest), dtype=np.int64)
        for row, found in enumerate(inputs):
            ids[row, : len(found)], mask[row, : len(found)] = found, 1
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        with self.lock:
            (hidden,) = self.session.run(["last_hidden_state"], {name: given[name] for name in self.inputs})
        weights = mask[:, :, None].astype(hidden.dtype)
        mean = (hidden * weights).sum(axis=1) / weights.sum(axis=1)
        return (mean / np.linalg.norm(mean, axis=1, keepdims=True)).astype("<f4")


def understand(body: bytes, *, served_model_id: str, dimensions: int) -> Asked:
    """What a request asks for; raises Refused."""
    try:
        asked = json.loads(body)
    except ValueError:
        raise Refused("the body is not JSON") from None
    if not isinstance(asked, dict):
        raise Refused("the body is not a JSON object")
    if asked.get("model") != served_model_id:
        raise Refused(f"this engine serves {served_model_id}", status=404, param="model", code="model_not_found")
    if asked.get("encoding_format", "float") not in ("float", "base64"):
        raise Refused("encoding_format is float or base64", param="encoding_format")
    if asked.get("dimensions") not in (None, dimensions):
        raise Refused(f"this model has {dimensions} dimensions", param="dimensions", code="unsupported_value")
    return Asked(_inputs(asked.get("input")), asked.get("encoding_format") == "base64")


def _inputs(value: Any) -> Any:
    """A text, texts, tokens, or lists of tokens: always as a list of inputs."""
    if isinstance(value, str) or (isinstance(value, list) and value and _are_tokens(value)):
        value = [value]
    if not isinstance(value, list) or not value:
        raise Refused("input is a text, or a list of texts or tokens", param="input")
    if len(value) > MOST_INPUTS:
        raise Refused(f"input has more than {MOST_INPUTS} entries", param="input")
    if not (all(isinstance(entry, str) and entry for entry in value) or all(_are_tokens(entry) for entry in value)):
        raise Refused("input has entries that are empty, or neither texts nor lists of tokens", param="input")
    return value


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(number) is int for number in value)


class Handler(BaseHTTPRequestHandler):
    """OpenAI's three paths that matter to an embedding model."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    wbufsize = -1
    disable_nagle_algorithm = True
    embedder: Embedder
    served_model_id: str
    started: int

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok"})
        elif self.path == "/v1/models":
            model = {"id": self.served_model_id, "object": "model", "created": self.started, "owned_by": "bedplate"}
            self._answer(200, {"object": "list", "data": [model]})
        else:
            self._fail(Refused(f"there is no {self.path}", status=404))

    def do_POST(self) -> None:
        try:
            self._answer(200, self._embeddings(self._body()))
        except Refused as refused:
            self._fail(refused)

    def _embeddings(self, body: bytes) -> dict[str, Any]:
        if self.path != "/v1/embeddings":
            raise Refused(f"there is no {self.path}", status=404)
        asked = understand(body, served_model_id=self.served_model_id, dimensions=self.embedder.dimensions)
        inputs = [self.embedder.ids_of(text) for text in asked.texts]
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, is_base64=asked.is_base64)}
            for index, vector in enumerate(self.embedder.embed(inputs))
        ]
        tokens = sum(len(ids) for ids in inputs)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self.served_model_id, "usage": usage}

    def _body(self) -> bytes:
        length = self.headers.get("content-length", "")
        if not length.isdigit():
            self.close_connection = True
            raise Refused("content-length is missing", status=411)
        if int(length) > MOST_BODY_BYTES:
            self.close_connection = True
            raise Refused(f"the body is larger than {MOST_BODY_BYTES} bytes", status=413)
        return self.rfile.read(int(length))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, refused: Refused) -> None:
        error = {"message": str(refused), "type": "invalid_request_error", "param": refused.param, "code": refused.code}
        self._answer(refused.status, {"error": error})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Requests are the gateway's to write down."""


def _encoded(vector: Any, *, is_base64: bool) -> str | list[float]:
    return base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve one embedding model over OpenAI's HTTP API.")
    parser.add_argument("--model", required=True, help="the ONNX file")
    parser.add_argument("--tokenizer", required=True, help="its tokenizer.json")
    parser.add_argument("--served-model-id", required=True, help="the id in /v1/models and in answers")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--context", type=int, default=256, help="most tokens of one input")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the machine has cores")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    began = time.monotonic()
    threads = arguments.threads or len(os.sched_getaffinity(0))
    Handler.embedder = Embedder(arguments.model, arguments.tokenizer, context=arguments.context, threads=threads)
    Handler.served_model_id, Handler.started = arguments.served_model_id, int(time.time())
    server = Server((arguments.host, arguments.port), Handler)
    host, port = server.server_address[:2]
    print(f"loaded in {time.monotonic() - began:.1f} s", flush=True)
    print(f"serving {arguments.served_model_id} on http://{host!s}:{port}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
