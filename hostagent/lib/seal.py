"""Secrets at rest on the host: encrypt-then-MAC under the host's key, so that a reboot needs nobody.

The one rule: nothing a tenant would call secret is written to the state directory unsealed. Encryption is AES-256-CTR by the
`openssl` program (the agent has no crypto of its own; the key reaches it through a pipe), the MAC is HMAC-SHA256 of the
standard library over version, context, salt and ciphertext. Every seal has keys of its own, derived from the host's key and a
16-byte random salt, so no key stream is ever used twice. See docs/decisions/0030.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from hostagent.lib import files
from hostagent.lib.program import run, secret_input
from hostagent.protocol.errors import AgentError

_VERSION = b"\x01"
_SALT_BYTES = 16
_MAC_BYTES = 32
_KEY_BYTES = 32
AT_REST = "host_file"


class SealBroken(ValueError):
    """The sealed bytes were altered, cut, belong to another context, or were sealed by another host."""


class HostSealer:
    """Seals under the 32-byte key in `key_path` (0600, made on first use)."""

    at_rest = AT_REST

    def __init__(self, key_path: Path) -> None:
        self._key_path = key_path
        self._key: bytes | None = None

    async def seal(self, plain: bytes, *, context: str) -> bytes:
        """Raises AgentError `program.missing` where the host has no openssl."""
        salt = os.urandom(_SALT_BYTES)
        cipher = await _crypt("-e", plain, self._derive(b"encrypt", salt))
        body = _VERSION + salt + cipher
        return body + self._mac(body, context, salt)

    async def open(self, sealed: bytes, *, context: str) -> bytes:
        """Raises SealBroken before a single byte is decrypted."""
        if len(sealed) < 1 + _SALT_BYTES + _MAC_BYTES or sealed[:1] != _VERSION:
            raise SealBroken("not a sealed value")
        body, mac = sealed[:-_MAC_BYTES], sealed[-_MAC_BYTES:]
        salt = body[1 : 1 + _SALT_BYTES]
        if not hmac.compare_digest(mac, self._mac(body, context, salt)):
            raise SealBroken(f"cannot open what was sealed for {context}")
        return await _crypt("-d", body[1 + _SALT_BYTES :], self._derive(b"encrypt", salt))

    def _mac(self, body: bytes, context: str, salt: bytes) -> bytes:
        named = len(context.encode()).to_bytes(4, "big") + context.encode()
        return hmac.digest(self._derive(b"authenticate", salt), named + body, "sha256")

    def _derive(self, purpose: bytes, salt: bytes) -> bytes:
        return hmac.digest(self._host_key(), purpose + b"\0" + salt, "sha256")

    def _host_key(self) -> bytes:
        if self._key is None:
            try:
                self._key = self._key_path.read_bytes()
            except FileNotFoundError:
                self._key = os.urandom(_KEY_BYTES)
                files.write_atomically(self._key_path, self._key, mode=0o600)
            if len(self._key) != _KEY_BYTES:
                raise AgentError("seal.key_broken", f"{self._key_path} does not hold {_KEY_BYTES} bytes", retryable=False)
        return self._key


async def _crypt(direction: str, data: bytes, key: bytes) -> bytes:
    """`openssl enc` derives AES key and IV from a password by one PBKDF2 round; the password is already a uniform key."""
    with secret_input(key.hex().encode() + b"\n") as password:
        finished = await run(
            "openssl", "enc", direction, "-aes-256-ctr", "-pbkdf2", "-iter", "1", "-nosalt", "-pass", f"fd:{password}",
            stdin=data, deadline_seconds=10.0, pass_fds=(password,),
        )  # fmt: skip
    return finished.stdout
