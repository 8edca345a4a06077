"""The clients of the benchmark: closed loop, open loop, and paced streams over kept connections.

`python -m tests.bench.gateway_load URL KEY MODE CONNECTIONS SECONDS|STREAMS [RATE]` prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from urllib.parse import urlsplit

import uvloop


def request(host: str, key: str, **more: object) -> bytes:
    body = json.dumps(
        {"model": "bench", "messages": [{"role": "user", "content": "x" * 100}], **more}, separators=(",", ":")
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)


async def closed(place: tuple[str, int], data: bytes, connections: int, seconds: float) -> dict:
    end = time.monotonic() + seconds
    count = 0

    async def one() -> None:
        nonlocal count
        reader, writer = await asyncio.open_connection(*place)
        while time.monotonic() < end:
            await exchange(reader, writer, data)
            count += 1
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return {"requests": count}


async def opened(place: tuple[str, int], data: bytes, connections: int, seconds: float, rate: float) -> dict:
    """Requests at fixed times, latency from the time each was due."""
    free: asyncio.Queue = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await asyncio.open_connection(*place))
    latencies: list[float] = []

    async def one(due: float) -> None:
        pair = await free.get()
        await exchange(*pair, data)
        latencies.append(time.monotonic() - due)
        free.put_nowait(pair)

    tasks = []
    start = time.monotonic()
    for number in range(int(seconds * rate)):
        due = start + number / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.ensure_future(one(due)))
    await asyncio.gather(*tasks)
    latencies.sort()
    return {"p50_ms": 1000 * latencies[len(latencies) // 2], "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)]}


async def streamed(place: tuple[str, int], data: bytes, streams: int) -> dict:
    async def one() -> int:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(data)
        whole = b""
        while b"0\r\n\r\n" not in whole[-16:]:
            part = await reader.read(65536)
            assert part, whole[-200:]
            whole += part
        writer.close()
        assert b"[DONE]" in whole
        return whole.count(b" word")

    return {"chunks": sum(await asyncio.gather(*(one() for _ in range(streams))))}


async def main(url: str, key: str, mode: str, connections: str, amount: str, rate: str = "0") -> None:
    parts = urlsplit(url)
    place = (parts.hostname or "", parts.port or 0)
    if mode == "streams":
        data = request(parts.netloc, key, stream=True, max_tokens=int(amount), pace=0.01)
        print(json.dumps(await streamed(place, data, int(connections))))
        return
    data = request(parts.netloc, key)
    if mode == "closed":
        print(json.dumps(await closed(place, data, int(connections), float(amount))))
    else:
        print(json.dumps(await opened(place, data, int(connections), float(amount), float(rate))))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
