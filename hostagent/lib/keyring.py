"""The keys of this host's volumes: made here, resting wrapped beside the data that they open, plain in memory alone.

The one rule: a key's file is on disk before its data is, and goes before its data does. Every volume and snapshot has, in
`keys/`, one file for each key that its data needs, named by the volume that the key was made for.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hmac
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hostagent.lib import files, wrap
from hostagent.lib.paths import Paths
from hostagent.lib.seal import HostSealer, SealBroken
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import EncryptionWanted, KekWanted

KEY_BYTES = 32
_CHECK = b"bedplate volume key"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """`check` tells a wrong key from the right one before data is opened with it. `host`: base64 of the key sealed under the
    host's; `wrapped`: base64 of the key wrapped to the KEK `kek_id`. Empty where there is none.
    """

    id: str
    check: str
    host: str = ""
    kek_id: str = ""
    wrapped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """`missing`: keys that only the control plane can hand in."""

    keys: dict[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    missing: tuple[str, ...] = ()


class KeyRing:
    """`transport`: the host's own key pair, to which keys are sealed on their way here."""

    def __init__(self, paths: Paths, sealer: HostSealer) -> None:
        self._sealer = sealer
        self._state = paths.state
        self._private_path = paths.state / "storage.key"
        self._public_path = paths.state / "storage.pub"
        self._known: dict[str, bytes] = {}
        self._unopened: set[str] = set()
        self._making = asyncio.Lock()

    async def public_key(self) -> str:
        """PEM; made at first use, once, however many ask."""
        async with self._making:
            if not self._public_path.exists():
                private = await wrap.generate()
                sealed = await self._sealer.seal(private, context="storage.key")
                files.write_atomically(self._private_path, sealed)
                files.write_atomically(self._public_path, (await wrap.public_of(private)).encode(), mode=0o644)
        return self._public_path.read_text(encoding="ascii")

    async def make(self, directory: Path, key_id: str, wanted: EncryptionWanted) -> None:
        """A key for data that is not there yet; one that can be opened already is kept."""
        if key_id in (await self.open(directory)).keys:
            return
        key = os.urandom(KEY_BYTES)
        file = KeyFile(id=key_id, check=_check_of(key))
        self._known[key_id] = key
        self._unopened.discard(key_id)
        _write(directory, await self._wrapped(file, key, unlock=wanted.unlock, kek=wanted.kek))

    def inherit(self, source: Path, target: Path) -> None:
        """What `target` is made of opens with the keys of `source`."""
        for path in _files(source):
            files.write_atomically(target / "keys" / path.name, path.read_bytes())

    async def open(self, directory: Path) -> Opened:
        keys: dict[str, bytes] = {}
        missing: list[str] = []
        for file in read(directory):
            key = self._known.get(file.id) or await self._open_one(file)
            if key is None:
                missing.append(file.id)
            else:
                keys[file.id] = key
        return Opened(keys=keys, missing=tuple(missing))

    def locked(self, directory: Path) -> tuple[str, ...]:
        """Which keys are missing, as far as is known without trying."""
        return tuple(
            file.id for file in read(directory) if file.id not in self._known and (not file.host or file.id in self._unopened)
        )

    async def settle(self, directory: Path, *, own_id: str, unlock: str | None, kek: KekWanted | None) -> None:
        """Every key that can be opened rests as is wanted; `unlock` None leaves the host's wrap as it is.

        The policy is that of the volume's own key alone: one inherited from a stricter origin stays as strict.
        """
        opened = (await self.open(directory)).keys
        for file in read(directory):
            key = opened.get(file.id)
            is_host = bool(file.host) if unlock is None or file.id != own_id else unlock == "host"
            is_right = bool(file.host) == is_host and file.id not in self._unopened
            if key is None or (is_right and (kek is None or file.kek_id == kek.id)):
                continue
            fresh = await self._wrapped(file, key, unlock="host" if is_host else "control_plane", kek=kek)
            _write(directory, fresh)
            self._unopened.discard(file.id)

    async def unlock(self, directory: Path, sealed: Iterable[tuple[str, str]]) -> None:
        """Keys from the control plane. Raises AgentError `key.wrong`, `key.unknown` (neither retryable)."""
        needed = {file.id: file for file in read(directory)}
        private = await self._sealer.open(self._private_path.read_bytes(), context="storage.key")
        for key_id, text in sealed:
            if key_id not in needed:
                raise AgentError("key.unknown", f"nothing here needs the key {key_id}", retryable=False)
            key = await wrap.unwrap(base64.b64decode(text), private, label=f"unlock:{key_id}")
            if not hmac.compare_digest(_check_of(key), needed[key_id].check):
                raise AgentError("key.wrong", f"this is not the key {key_id}", retryable=False)
            self._known[key_id] = key

    def erase(self, directory: Path) -> None:
        """The keys' files go first: what is left of the data afterwards cannot be read. What other volumes and snapshots are
        made of stays known.
        """
        key_ids = [file.id for file in read(directory)]
        keys = directory / "keys"
        if keys.exists():
            shutil.rmtree(keys)
            files.sync_directory(directory)
        for key_id in key_ids:
            if not any(self._state.glob(f"*/*/keys/{key_id}.json")):
                self._known.pop(key_id, None)

    async def _open_one(self, file: KeyFile) -> bytes | None:
        if not file.host:
            return None
        try:
            key = await self._sealer.open(base64.b64decode(file.host), context=f"volume-key:{file.id}")
        except SealBroken:
            self._unopened.add(file.id)
            return None
        if hmac.compare_digest(_check_of(key), file.check):
            return key
        self._unopened.add(file.id)
        return None

    async def _wrapped(self, file: KeyFile, key: bytes, *, unlock: str, kek: KekWanted | None) -> KeyFile:
        host = ""
        if unlock == "host":
            host = base64.b64encode(await self._sealer.seal(key, context=f"volume-key:{file.id}")).decode()
        else:
            self._known[file.id] = key
        if kek is None or file.kek_id == kek.id:
            return dataclasses.replace(file, host=host)
        wrapped = await wrap.wrap(key, kek.public_key, label=f"volume-key:{file.id}")
        return dataclasses.replace(file, host=host, kek_id=kek.id, wrapped=base64.b64encode(wrapped).decode())


def read(directory: Path) -> tuple[KeyFile, ...]:
    """Raises AgentError `volume.damaged` where a file is no key's."""
    try:
        return tuple(codec.decode(KeyFile, json.loads(path.read_bytes())) for path in _files(directory))
    except ValueError as error:
        raise AgentError("volume.damaged", f"a key below {directory} cannot be read: {error}", retryable=False) from error


def handed_out(directory: Path) -> list[dict[str, str]]:
    """What the control plane keeps of every key."""
    return [{"id": file.id, "kek_id": file.kek_id, "wrapped": file.wrapped} for file in read(directory)]


def _files(directory: Path) -> list[Path]:
    return sorted((directory / "keys").glob("[!.]*.json"))


def _write(directory: Path, file: KeyFile) -> None:
    files.write_atomically(directory / "keys" / f"{file.id}.json", json.dumps(codec.encode(file)).encode())


def _check_of(key: bytes) -> str:
    return hmac.digest(key, _CHECK, "sha256")[:8].hex()
