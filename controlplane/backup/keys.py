"""The file that holds the keys: the master key and the operator's first token, 0600, under a passphrase when one is given.

The one rule: it is written apart from the database's file, because either alone opens nothing.
"""

from __future__ import annotations

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from controlplane.backup.archive import BackupUnusable, key_id
from controlplane.core.files import write_whole
from controlplane.core.sealing import KEY_BYTES, Sealer

KIND = "bedplate-keys"
FORMAT = 1
_COST = {"n": 1 << 15, "r": 8, "p": 1}  # 32 MiB for 0.1 s, RFC 7914 section 2
_MAX_COST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """`operator_token` is empty when the state directory had none."""

    master_key: bytes
    operator_token: str = ""

    @property
    def sealer(self) -> Sealer:
        return Sealer(self.master_key)


def save(path: Path, keys: Keys, passphrase: str = "") -> None:
    """Write the file, whole or not at all. Raises OSError."""
    plain = json.dumps({"master_key": _text(keys.master_key), "operator_token": keys.operator_token}).encode()
    content: dict[str, Any] = {"kind": KIND, "format": FORMAT, "key_id": key_id(keys.sealer)}
    if passphrase:
        salt, nonce = os.urandom(16), os.urandom(12)
        sealed = AESGCM(_stretched(passphrase, salt, **_COST)).encrypt(nonce, plain, KIND.encode())
        content |= {"scrypt": {**_COST, "salt": _text(salt)}, "nonce": _text(nonce), "sealed": _text(sealed)}
    else:
        content |= {"plain": _text(plain)}
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n")


def load(path: Path, passphrase: str = "") -> Keys:
    """Raises BackupUnusable: no such file, another file, damaged, no or a wrong passphrase."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BackupUnusable(f"cannot read the keys file {path}: {error.strerror}") from error
    except ValueError as error:
        raise BackupUnusable(f"{path.name} is not a keys file, or damaged") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise BackupUnusable(f"{path.name} is not a keys file of a backup")
    if content.get("format") != FORMAT:
        raise BackupUnusable(f"{path.name} has format {content.get('format')}, which this version of Bedplate does not read")
    try:
        opened = json.loads(_bytes(content["plain"]) if "plain" in content else _unsealed(content, path, passphrase))
        keys = Keys(master_key=_bytes(opened["master_key"]), operator_token=str(opened["operator_token"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BackupUnusable(f"the keys file {path.name} is damaged") from error
    if len(keys.master_key) != KEY_BYTES:
        raise BackupUnusable(f"the keys file {path.name} is damaged")
    return keys


def _unsealed(content: dict[str, Any], path: Path, passphrase: str) -> bytes:
    if not passphrase:
        raise BackupUnusable(f"{path.name} is under a passphrase: give it by --passphrase-file")
    cost = {name: int(content["scrypt"][name]) for name in _COST}
    if not 2 <= cost["n"] <= _MAX_COST or cost["r"] > 64 or cost["p"] > 16:
        raise ValueError("an absurd cost")
    key = _stretched(passphrase, _bytes(content["scrypt"]["salt"]), **cost)
    try:
        return AESGCM(key).decrypt(_bytes(content["nonce"]), _bytes(content["sealed"]), KIND.encode())
    except InvalidTag as error:
        raise BackupUnusable(
            f"the passphrase is not the one that {path.name} was written with, or the file is damaged"
        ) from error


def _stretched(passphrase: str, salt: bytes, *, n: int, r: int, p: int) -> bytes:
    return Scrypt(salt=salt, length=KEY_BYTES, n=n, r=r, p=p).derive(passphrase.encode())


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
