"""A stream whose client is gone ends when the machine stays silent, on the relay and on the host; a slow answer arrives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.watch import relay
from hostagent.serve import streams

DEADLINE_SECONDS = 10.0
SILENCE_SECONDS = 0.2


class Machine:
    """The far side: silent after its words, for ever."""

    def __init__(self, *words: bytes) -> None:
        self.words = list(words)
        self.is_closed = False

    async def read(self, limit: int = 65_536) -> bytes:
        del limit
        if self.words:
            await asyncio.sleep(SILENCE_SECONDS / 2)
            return self.words.pop(0)
        await asyncio.Event().wait()
        return b""

    async def write(self, data: bytes) -> None: ...

    async def write_eof(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


@contextlib.asynccontextmanager
async def accepted(path: Path) -> AsyncIterator[tuple[asyncio.StreamWriter, asyncio.StreamReader, asyncio.StreamReader]]:
    """A client that has said all, as the server sees it: (server's writer, server's reader, client's reader)."""
    arrived: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_unix_server(lambda reader, writer: arrived.set_result((reader, writer)), path)
    client_reader, client_writer = await asyncio.open_unix_connection(path)
    client_writer.write_eof()
    reader, writer = await arrived
    yield writer, reader, client_reader
    client_writer.close()
    writer.close()
    server.close()


async def test_the_relay_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay, "SILENCE_SECONDS", SILENCE_SECONDS)
    machine = Machine(b"one", b"two", b"three")
    async with accepted(tmp_path / "s") as (writer, reader, client), asyncio.timeout(DEADLINE_SECONDS):
        await relay._pump(reader, writer, machine)
        assert await client.readexactly(11) == b"onetwothree"
    assert machine.is_closed


async def test_the_host_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "SILENCE_SECONDS", SILENCE_SECONDS)
    async with (
        accepted(tmp_path / "near") as (writer, reader, client),
        accepted(tmp_path / "far") as (far_writer, _, _),
        asyncio.timeout(DEADLINE_SECONDS),
    ):
        silent = asyncio.StreamReader()
        silent.feed_data(b"a word")
        await streams._pump(reader, writer, silent, far_writer)
        assert await client.readexactly(6) == b"a word"
