"""Files of images by URL, into the store. The one rule: what the digest does not name is not kept, whatever the server says."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from controlplane.core.pace import Pace
from controlplane.resources.image.errors import BlobMismatch
from controlplane.resources.image.store import ImageStore, write_all

CONNECT_SECONDS = 20
SILENT_SECONDS = 60
SLICE_SECONDS = 60.0
TELL_SECONDS = 2.0


@functools.cache
def pace_of(bytes_per_second: int) -> Pace:
    """All downloads of this process share one."""
    return Pace(bytes_per_second)


class FetchRefused(RuntimeError):
    """The server has no such file for us; trying again cures nothing."""


class FetchBusy(RuntimeError):
    """Another image's run is fetching the same file."""


class FetchBroken(RuntimeError):
    """The server does not answer, or the answer was cut: what arrived is kept, and the next try goes on there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    url: str
    sha256: str
    size_bytes: int


async def fetch(store: ImageStore, file: Wanted, pace: Pace, tell: Callable[[int], Awaitable[None]]) -> bool:
    """Fetch for a while, going on where the last try stopped; True: the file is whole and in the store.

    `tell` hears how many bytes there are, now and then. Raises FetchRefused, FetchBusy, FetchBroken, BlobMismatch,
    ImageStoreFull.
    """
    part = part_of(store, file.sha256)
    store.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = await asyncio.to_thread(os.open, part, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _hold(descriptor)
        if os.fstat(descriptor).st_size < file.size_bytes and not await _receive(descriptor, file, pace, tell):
            return False
        await tell(os.fstat(descriptor).st_size)
        found = await asyncio.to_thread(_digest, part)
        if os.fstat(descriptor).st_size != file.size_bytes or found != file.sha256:
            size_bytes = os.fstat(descriptor).st_size
            part.unlink()
            words = f"{file.url} gave {size_bytes} bytes with sha256 {found}, not {file.size_bytes} with {file.sha256}"
            raise BlobMismatch(words)
        await asyncio.to_thread(store.keep, descriptor, part, file.sha256)
    finally:
        os.close(descriptor)
    return True


def _hold(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FetchBusy from None


def part_of(store: ImageStore, sha256: str) -> Path:
    return store.directory / f".fetch-{sha256}"


async def _receive(descriptor: int, file: Wanted, pace: Pace, tell: Callable[[int], Awaitable[None]]) -> bool:
    """Append what comes; False when the time is over and the server lets us go on later."""
    offset = os.fstat(descriptor).st_size
    began = told = time.monotonic()
    async with _answer(file.url, offset) as answer:
        if answer.status_code != 206:
            os.ftruncate(descriptor, 0)
            offset = 0
        os.lseek(descriptor, offset, os.SEEK_SET)
        goes_on = answer.status_code == 206 or answer.headers.get("accept-ranges") == "bytes"
        async for chunk in answer.aiter_raw():
            await asyncio.to_thread(write_all, descriptor, chunk)
            offset += len(chunk)
            await pace.spend(len(chunk))
            now = time.monotonic()
            if offset > file.size_bytes:
                return True
            if now - told > TELL_SECONDS:
                await tell(offset)
                told = now
            if goes_on and now - began > SLICE_SECONDS and offset < file.size_bytes:
                return False
    if offset < file.size_bytes:
        raise FetchBroken(f"{file.url} ended after {offset} of {file.size_bytes} bytes")
    return True


@asynccontextmanager
async def _answer(url: str, offset: int) -> AsyncIterator[httpx2.Response]:
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={offset}-"} if offset else {})
    timeout = httpx2.Timeout(SILENT_SECONDS, connect=CONNECT_SECONDS)
    try:
        async with (
            httpx2.AsyncClient(timeout=timeout, follow_redirects=True) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code == 206 and not answer.headers.get("content-range", "").startswith(f"bytes {offset}-"):
                raise FetchBroken(f"{url} answered with another part than the one that was asked for")
            if answer.is_client_error and answer.status_code not in (408, 416, 429):
                raise FetchRefused(f"{url} answered {answer.status_code}")
            if not answer.is_success:
                raise FetchBroken(f"{url} answered {answer.status_code}")
            yield answer
    except httpx2.TransportError as error:
        raise FetchBroken(f"{url} cannot be fetched: {error or type(error).__name__}") from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, httpx2.TooManyRedirects) as error:
        raise FetchRefused(f"{url} cannot be fetched: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
