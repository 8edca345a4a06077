"""The engine of the benchmark: answers at once, or streams N chunks at a pace. `python -m tests.bench.gateway_upstream PORT`."""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

ANSWER = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x" * 100}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 25, "total_tokens": 45},
    }
).encode()
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(document: dict) -> bytes:
    body = b"data: " + json.dumps(document).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


CHUNK = event(
    {
        "id": "c1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "bench",
        "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
    }
)
USAGE = event({"id": "c1", "choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 25, "total_tokens": 45}})
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Engine(asyncio.Protocol):
    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(rest) < length:
                return
            body, self.buffer = rest[:length], rest[length:]
            if b'"stream":true' in body:
                asyncio.get_running_loop().create_task(self.stream(json.loads(body)))
            else:
                self.transport.write(PLAIN)

    async def stream(self, asked: dict) -> None:
        self.transport.write(HEAD)
        for _ in range(asked["max_tokens"]):
            await asyncio.sleep(asked.get("pace", 0.01))
            self.transport.write(CHUNK)
        self.transport.write(USAGE + END)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
