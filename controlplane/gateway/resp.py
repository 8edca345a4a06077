"""A small client of Redis: one connection, questions sent as they come and answered in order (RESP2), each within its time.

The one rule: what fails is `RedisAway`, and the connection is made anew by the next question. (A pool of connections and a lock
around each cost a request several times what the question itself does.)
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import cast
from urllib.parse import parse_qs, unquote, urlsplit

Reply = int | bytes | None | list["Reply"]


class RedisAway(Exception):
    """It does not answer in time, or not at all."""


class Refused(Exception):
    """An error reply, in Redis's words."""


class _Cut(Exception):
    """More bytes are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where it is; raises ValueError for what is no Redis URL."""

    host: str = ""
    port: int = 6379
    path: str = ""
    is_tls: bool = False
    username: str = ""
    password: str = ""
    database: int = 0

    @classmethod
    def of(cls, url: str) -> Place:
        parts = urlsplit(url)
        if parts.scheme not in {"redis", "rediss", "unix"}:
            raise ValueError(f"{parts.scheme}:// is no Redis URL: redis://, rediss:// or unix://")
        is_unix = parts.scheme == "unix"
        database = parse_qs(parts.query).get("db", ["0" if is_unix else parts.path.strip("/") or "0"])[0]
        return cls(
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            path=unquote(parts.path) if is_unix else "",
            is_tls=parts.scheme == "rediss",
            username=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
            database=int(database),
        )


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: asyncio.WriteTransport | None = None
        self._waiting: deque[asyncio.Future[Reply]] = deque()
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)  # uvloop's is one, but no subclass

    def ask(self, question: bytes) -> asyncio.Future[Reply]:
        if self.transport is None or self.transport.is_closing():
            raise RedisAway("the connection is closed")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self.transport.write(question)
        return answer

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        place = 0
        with suppress(_Cut):
            while place < len(self._buffer):
                reply, place = parse(self._buffer, place)
                self._answer(reply)
        self._buffer = self._buffer[place:]

    def _answer(self, reply: Reply | Refused) -> None:
        waiter = self._waiting.popleft()
        if waiter.done():  # nobody waits any longer
            return
        if isinstance(reply, Refused):
            waiter.set_exception(reply)
        else:
            waiter.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(RedisAway(str(exc) if exc else "the connection was closed"))
        self._waiting.clear()


class Client:
    def __init__(self, url: str, *, answer_seconds: float) -> None:
        self._place = Place.of(url)
        self._seconds = answer_seconds
        self._connection: _Connection | None = None
        self._connecting = asyncio.Lock()

    async def ask(self, *words: bytes | str | int) -> Reply:
        """One command and its reply; raises RedisAway and Refused."""
        try:
            async with asyncio.timeout(self._seconds):
                connection = self._connection
                if connection is None or connection.transport is None or connection.transport.is_closing():
                    connection = await self._connected()
                return await connection.ask(command(*words))
        except (OSError, TimeoutError) as error:
            self.close()
            raise RedisAway(str(error) or "no answer in time") from error

    async def _connected(self) -> _Connection:
        async with self._connecting:
            connection = self._connection
            if connection is not None and connection.transport is not None and not connection.transport.is_closing():
                return connection
            loop, place = asyncio.get_running_loop(), self._place
            if place.path:
                _, connection = await loop.create_unix_connection(_Connection, place.path)
            else:
                context = ssl.create_default_context() if place.is_tls else None
                _, connection = await loop.create_connection(_Connection, place.host, place.port, ssl=context)
            self._connection = connection
            if place.password:
                await connection.ask(command("AUTH", *([place.username] if place.username else []), place.password))
            if place.database:
                await connection.ask(command("SELECT", place.database))
            return connection

    def close(self) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.abort()
        self._connection = None


def command(*words: bytes | str | int) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def parse(data: bytes, start: int) -> tuple[Reply | Refused, int]:
    """One reply and where it ends; raises _Cut when it is not whole."""
    end = data.find(b"\r\n", start)
    if end < 0:
        raise _Cut
    kind, text, end = data[start], data[start + 1 : end], end + 2
    if kind == ord(":"):
        return int(text), end
    if kind == ord("+"):
        return text, end
    if kind == ord("-"):
        return Refused(text.decode("utf-8", "replace")), end
    size = int(text)
    if size < 0:
        return None, end
    if kind == ord("$"):
        if len(data) < end + size + 2:
            raise _Cut
        return data[end : end + size], end + size + 2
    items: list[Reply] = []
    for _ in range(size):
        item, end = parse(data, end)
        if isinstance(item, Refused):
            return item, end
        items.append(item)
    return items, end
