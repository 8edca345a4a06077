"""The local journal: append-only segments of lines `<crc32> <json>`; `open`, `progress` each second, `close`.

The one rule: a record is one write() system call, made before the last byte of the answer goes out; a line that was cut
by a crash fails its checksum and counts as never written. Segment numbers are microseconds since the epoch and only rise,
so a number is never used twice, not even when the directory is lost.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from controlplane.core import json
from controlplane.metering.record import Closing, Opening, Outcome

_SUFFIX = ".journal"
SEGMENT_BYTES = 8 << 20


class JournalInUse(RuntimeError):
    """Another live process writes this journal; two gateways need two instance names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    segment: int
    sequence: int
    at: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    opening: Opening
    closing: Closing


Entry = Opening | Progress | Closed


class Journal:
    """The writer. One a process; `open_segment` is the segment being written."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, is_synced: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._lock = _lock(directory)
        self.inherited = segments(directory)
        self._sequence = 0
        self._live: dict[tuple[int, int], Opening] = {}
        self._descriptor = -1
        self._is_synced = is_synced
        self._unsynced: list[int] = []  # segments that were left since the last sync
        self._is_torn = False
        self.open_segment = self.inherited[-1] if self.inherited else 0
        self._begin_segment()

    def _begin_segment(self) -> None:
        """Start the next segment; the directory is synced so that the name survives a power cut."""
        number = max(time.time_ns() // 1000, self.open_segment + 1)
        descriptor = os.open(path_of(self.directory, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        if self._descriptor >= 0:
            self._unsynced.append(self._descriptor)
        if not self._is_synced:
            self._close_unsynced()
        self._descriptor, self.open_segment, self._written = descriptor, number, 0
        parent = os.open(self.directory, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)

    def open(self, **known: object) -> Opening:
        """Write down that a request goes to a replica; `known` is Opening without its identity and time."""
        if self._written >= self._segment_bytes:
            self._begin_segment()
        self._sequence += 1
        opening = Opening(
            segment=self.open_segment,
            sequence=self._sequence,
            started_at=time.time_ns() // 1000,
            **known,  # pyright: ignore[reportArgumentType]
        )
        self._write({"o": opening})
        self._live[opening.segment, opening.sequence] = opening
        return opening

    def progress(self, opening: Opening, *, prompt_tokens: int, completion_tokens: int) -> None:
        at = time.time_ns() // 1000
        self._write({"p": [opening.segment, opening.sequence, at, prompt_tokens, completion_tokens]})

    def close(self, opening: Opening, closing: Closing) -> None:
        """Write down how it ended, once; a second close of the same opening changes nothing. What cannot be written (OSError)
        stays open, so that its segment is kept and the next process settles it.
        """
        if (opening.segment, opening.sequence) in self._live:
            self._write({"c": [opening, closing]})
            del self._live[opening.segment, opening.sequence]

    def _write(self, entry: dict[str, object]) -> None:
        """Dataclasses go to orjson as they are: `asdict` copies deeply, which cost a third of a request."""
        body = json.dumps(entry)
        line = b"%08x %b\n" % (zlib.crc32(body), body)
        if self._is_torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._written += written
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, "the journal's disk is full", str(self.directory))

    async def sync(self) -> None:
        """Fdatasync in a thread: what was written until this call survives a power cut, in the segments left before too.

        Whoever calls it says so by `is_synced`. The thread has descriptors of its own: a segment may be left meanwhile.
        """
        mine = [*self._unsynced, os.dup(self._descriptor)]
        self._unsynced.clear()
        await asyncio.to_thread(_sync_and_close, mine)

    def _close_unsynced(self) -> None:
        for descriptor in self._unsynced:
            os.close(descriptor)
        self._unsynced.clear()

    def live_segments(self) -> set[int]:
        """Segments that open requests, or the writer, still need."""
        return {self.open_segment, *(segment for segment, _ in self._live)}

    def size_bytes(self) -> int:
        """Bytes of all segments on disk."""
        return sum(path.stat().st_size for path in self.directory.glob(f"*{_SUFFIX}"))

    def shut(self) -> None:
        """Close the file and let another process have the directory; what is open settles as after a crash."""
        if not self._lock.closed:
            self._close_unsynced()
            os.close(self._descriptor)
            self._lock.close()


def _sync_and_close(descriptors: list[int]) -> None:
    try:
        for descriptor in descriptors:
            os.fdatasync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _lock(directory: Path) -> IO[bytes]:
    lock = (directory / "lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise JournalInUse(f"{directory} is in use by another gateway process") from error
    return lock


def path_of(directory: Path, segment: int) -> Path:
    return directory / f"{segment:020d}{_SUFFIX}"


def segments(directory: Path) -> list[int]:
    """Numbers of the segments there are, oldest first."""
    return sorted(int(path.name.removesuffix(_SUFFIX)) for path in directory.glob(f"*{_SUFFIX}"))


def drop(directory: Path, segment: int) -> None:
    with suppress(FileNotFoundError):
        path_of(directory, segment).unlink()


def read(
    directory: Path, segment: int, offset: int, limit_bytes: int = 1 << 20, *, closed_only: bool = False
) -> tuple[list[Entry], int]:
    """Entries from `offset` on (about `limit_bytes` of them) and the offset to go on from; cut or broken lines are skipped."""
    with path_of(directory, segment).open("rb") as file:
        file.seek(offset)
        data = file.read(limit_bytes)
        if data and not data.endswith(b"\n"):
            data += file.readline()
    end = data.rfind(b"\n") + 1
    return list(_entries(data[:end], b'{"c"' if closed_only else b"")), offset + end


def _entries(data: bytes, prefix: bytes) -> Iterator[Entry]:
    for line in data.splitlines():
        body = line[9:]
        if not body.startswith(prefix):
            continue
        try:
            if int(line[:8], 16) == zlib.crc32(body):
                yield _entry(json.loads(body))
        except (ValueError, TypeError, KeyError):
            continue  # cut by a crash, or a format of another version: counted as never written


def _entry(value: object) -> Entry:
    if not isinstance(value, dict):
        raise TypeError("an entry is an object")
    if "o" in value:
        return Opening(**value["o"])
    if "p" in value:
        segment, sequence, at, prompt, completion = value["p"]
        return Progress(segment=segment, sequence=sequence, at=at, prompt_tokens=prompt, completion_tokens=completion)
    opening, closing = value["c"]
    closing["outcome"] = Outcome(closing["outcome"])
    return Closed(opening=Opening(**opening), closing=Closing(**closing))
