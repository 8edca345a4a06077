"""The image store: files under `<state_dir>/images/<sha256>`. The one rule: a name appears only after its bytes were
verified and are on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from controlplane.resources.image.errors import BlobMismatch, ImageStoreFull

CHUNK_BYTES = 1 << 20


class ImageStore:
    """One directory; every process of the machine may read it, the API writes it."""

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "images"

    def path(self, sha256: str) -> Path:
        return self.directory / sha256

    def has(self, sha256: str, size_bytes: int) -> bool:
        try:
            return self.path(sha256).stat().st_size == size_bytes
        except FileNotFoundError:
            return False

    async def write(self, chunks: AsyncIterator[bytes], *, sha256: str, size_bytes: int) -> None:
        """Take a file from a stream; raises BlobMismatch or ImageStoreFull, and keeps nothing then."""
        digest = hashlib.sha256()
        seen = 0
        with self._part() as (descriptor, part):
            async for chunk in chunks:
                seen += len(chunk)
                if seen > size_bytes:
                    raise BlobMismatch(f"more than the {size_bytes} bytes of the manifest arrived")
                digest.update(chunk)
                await asyncio.to_thread(write_all, descriptor, chunk)
            if seen != size_bytes or digest.hexdigest() != sha256:
                raise BlobMismatch(f"{seen} bytes with sha256 {digest.hexdigest()} arrived, not {size_bytes} with {sha256}")
            await asyncio.to_thread(self.keep, descriptor, part, sha256)

    async def take_file(self, source: Path, *, sha256: str, size_bytes: int) -> None:
        """Copy a file of this machine; raises like `write`."""
        await self.write(_chunks_of(source), sha256=sha256, size_bytes=size_bytes)

    def remove(self, sha256: str) -> None:
        self.path(sha256).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _part(self) -> Iterator[tuple[int, Path]]:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".part-", dir=self.directory)
        try:
            yield descriptor, Path(name)
        finally:
            os.close(descriptor)
            Path(name).unlink(missing_ok=True)

    def keep(self, descriptor: int, part: Path, sha256: str) -> None:
        """Give a verified file of this directory its name."""
        os.fsync(descriptor)
        part.rename(self.path(sha256))
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_all(descriptor: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ImageStoreFull from error
        raise


async def _chunks_of(source: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(source.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
