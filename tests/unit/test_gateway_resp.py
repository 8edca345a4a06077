"""Replies of Redis, however they are cut."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.gateway.resp import Place, RedisAway, Refused, _Connection, command

WIRE = b"+PONG\r\n:42\r\n$-1\r\n$5\r\na\r\nbc\r\n*3\r\n:1\r\n*1\r\n$1\r\nx\r\n$0\r\n\r\n-ERR no\r\n"
REPLIES = [b"PONG", 42, None, b"a\r\nbc", [1, [b"x"], b""]]


class Transport(asyncio.WriteTransport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(WIRE)])
async def test_replies_in_pieces(size: int) -> None:
    connection = _Connection()
    connection.connection_made(Transport())
    asked = [connection.ask(b"") for _ in range(len(REPLIES) + 1)]
    for start in range(0, len(WIRE), size):
        connection.data_received(WIRE[start : start + size])
    assert [await answer for answer in asked[:-1]] == REPLIES
    with pytest.raises(Refused, match="ERR no"):
        await asked[-1]


async def test_a_lost_connection_answers_everybody() -> None:
    connection = _Connection()
    connection.connection_made(Transport())
    asked = [connection.ask(command("PING")) for _ in range(2)]
    connection.connection_lost(None)
    for answer in asked:
        with pytest.raises(RedisAway):
            await answer


def test_places() -> None:
    assert Place.of("unix:///run/vk.sock?db=2") == Place(host="localhost", path="/run/vk.sock", database=2)
    assert Place.of("redis://:p%40ss@h:7000/3") == Place(host="h", port=7000, password="p@ss", database=3)
    assert Place.of("rediss://u:p@h").is_tls
    with pytest.raises(ValueError, match="http"):
        Place.of("http://h")
