"""The file that holds a database: a line of JSON about it, then the dump in sealed chunks.

The one rule: nobody reads a byte of the dump that was not written here under the same master key: every chunk is sealed
(AES-256-GCM) under a key made for this file, its place and whether it is the last are part of the nonce, and the header is
authenticated with it. A file that was cut, changed or put together from two does not open.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from controlplane.core.sealing import Sealer

MAGIC = b"BEDPLATE BACKUP\n"
FORMAT = 1
CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 16
_TAG_BYTES = 16


class BackupUnusable(RuntimeError):
    """The file is no backup, is damaged, or belongs to another master key; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`key_id` tells master keys apart and reveals nothing of them; `revision` is the database's schema."""

    format: int
    product: str
    revision: str
    epoch: int
    created_at: str
    key_id: str
    salt: str


def key_id(sealer: Sealer) -> str:
    return sealer.derive(context="backup.key_id")[:8].hex()


class Writer:
    """Seals what is written to it into `file`; without `finish` the file does not open."""

    def __init__(self, file: IO[bytes], sealer: Sealer, *, product: str, revision: str, epoch: int, created_at: str) -> None:
        salt = os.urandom(16).hex()
        self.header = Header(
            format=FORMAT,
            product=product,
            revision=revision,
            epoch=epoch,
            created_at=created_at,
            key_id=key_id(sealer),
            salt=salt,
        )
        line = json.dumps(asdict(self.header)).encode() + b"\n"
        self._file, self._cipher, self._mark = file, _cipher(sealer, salt), hashlib.sha256(line).digest()
        self._count = 0
        self._pending = b""
        file.write(MAGIC + line)

    def write(self, plain: bytes) -> None:
        self._pending += plain
        while len(self._pending) > CHUNK_BYTES:
            self._put(self._pending[:CHUNK_BYTES], is_last=False)
            self._pending = self._pending[CHUNK_BYTES:]

    def finish(self) -> None:
        self._put(self._pending, is_last=True)

    def _put(self, plain: bytes, *, is_last: bool) -> None:
        sealed = self._cipher.encrypt(_nonce(self._count, is_last=is_last), plain, self._mark)
        self._file.write(struct.pack(">I", len(sealed)) + sealed)
        self._count += 1


class Reader:
    """What `Writer` wrote. `header` is read at once, and is true only as far as `chunks` opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.header, self._line, self._start = _read_header(file, path)
        except OSError as error:
            raise BackupUnusable(f"cannot read {path}: {error.strerror}") from error

    def chunks(self, sealer: Sealer) -> Iterator[bytes]:
        """The dump, piece by piece; raises BackupUnusable where it does not open."""
        if key_id(sealer) != self.header.key_id:
            raise BackupUnusable(
                f"{self.path.name} was made under another master key (its id is {self.header.key_id}, this one's is "
                f"{key_id(sealer)}): give the keys file that was written with it"
            )
        cipher, mark = _cipher(sealer, self.header.salt), hashlib.sha256(self._line).digest()
        with self.path.open("rb") as file:
            file.seek(self._start)
            yield from _opened(file, cipher, mark, self.path.name)

    def verify(self, sealer: Sealer) -> int:
        """Open all of it and throw it away; how many bytes the dump has. Raises BackupUnusable."""
        return sum(len(chunk) for chunk in self.chunks(sealer))


def _opened(file: IO[bytes], cipher: AESGCM, mark: bytes, name: str) -> Iterator[bytes]:
    count, is_last = 0, False
    while not is_last:
        prefix = file.read(4)
        length = struct.unpack(">I", prefix)[0] if len(prefix) == 4 else 0
        if not _TAG_BYTES <= length <= CHUNK_BYTES + _TAG_BYTES:
            raise BackupUnusable(f"{name} ends in its middle, or is damaged, at chunk {count}: take another copy of it")
        sealed = file.read(length)
        if len(sealed) != length:
            raise BackupUnusable(f"{name} is cut at chunk {count}: take another copy of it")
        following = file.read(1)
        is_last = not following
        file.seek(-len(following), os.SEEK_CUR)
        try:
            yield cipher.decrypt(_nonce(count, is_last=is_last), sealed, mark)
        except InvalidTag as error:
            raise BackupUnusable(f"{name} is cut or damaged at chunk {count}: take another copy of it") from error
        count += 1


def _read_header(file: IO[bytes], path: Path) -> tuple[Header, bytes, int]:
    if file.read(len(MAGIC)) != MAGIC:
        raise BackupUnusable(f"{path.name} is not a backup of Bedplate")
    line = file.readline(_MAX_HEADER_BYTES)
    try:
        content = json.loads(line)
        if content["format"] > FORMAT:
            raise BackupUnusable(
                f"{path.name} has format {content['format']}, this version of Bedplate reads up to {FORMAT}: use a newer one"
            )
        return Header(**content), line, file.tell()
    except (ValueError, KeyError, TypeError) as error:
        raise BackupUnusable(f"the head of {path.name} is damaged: take another copy of it") from error


def _cipher(sealer: Sealer, salt: str) -> AESGCM:
    return AESGCM(sealer.derive(context=f"backup:{salt}"))


def _nonce(count: int, *, is_last: bool) -> bytes:
    return count.to_bytes(11, "big") + (b"\x01" if is_last else b"\x00")
