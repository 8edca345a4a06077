"""Secrets at rest: AES-256-GCM under the deployment's master key, bound to what they belong to.

The one rule: the `context` (for example `host.ssh_key:host_01h…`) is authenticated, so a sealed value copied to
another row does not open. A database dump alone opens nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_VERSION = b"\x01"
_NONCE_BYTES = 12
KEY_BYTES = 32


class SealBroken(ValueError):
    """The value was altered, belongs to another context, or was sealed under another key."""


class Sealer:
    """Seals and opens with one 32-byte master key."""

    def __init__(self, master_key: bytes) -> None:
        if len(master_key) != KEY_BYTES:
            raise ValueError(f"a master key has {KEY_BYTES} bytes, not {len(master_key)}")
        self._cipher = AESGCM(master_key)
        self._master_key = master_key

    def seal(self, plain: bytes, *, context: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, plain, context.encode())

    def derive(self, *, context: str) -> bytes:
        """32 bytes that only holders of the master key can make; the same for the same context."""
        return hmac.new(self._master_key, b"derive:" + context.encode(), hashlib.sha256).digest()

    def open(self, sealed: bytes, *, context: str) -> bytes:
        """The plain bytes; raises SealBroken."""
        if sealed[:1] != _VERSION:
            raise SealBroken("unknown seal version")
        nonce, body = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, body, context.encode())
        except (InvalidTag, ValueError) as error:  # ValueError: cut so short that there is no nonce
            raise SealBroken(f"cannot open what was sealed for {context}") from error
