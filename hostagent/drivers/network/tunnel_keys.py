"""The private keys of tunnel interfaces: made here, sealed at rest, never shown. The one rule: only public halves leave.

A key belongs to (slot, key generation), so that a rotation is a new key in the other slot and a repeat of it is not.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

from hostagent.lib import files
from hostagent.lib.program import run
from hostagent.lib.seal import HostSealer, SealBroken
from hostagent.protocol.errors import AgentError

WG = "/usr/bin/wg"


class TunnelKeys:
    """One file a key below `directory`, mode 0600."""

    def __init__(self, directory: Path, sealer: HostSealer) -> None:
        self._directory = directory
        self._sealer = sealer

    async def public(self, slot: str, generation: int) -> str:
        """The public half; the key is made when there is none. Raises AgentError `program.missing` without `wg`."""
        path = self._path(slot, generation)
        try:
            return str(json.loads(path.read_bytes())["public"])
        except FileNotFoundError:
            return await self._make(path, slot, generation)
        except (ValueError, KeyError, TypeError) as error:
            raise AgentError("tunnel.key_broken", f"{path}: {error}", retryable=False) from error

    async def private(self, slot: str, generation: int) -> bytes:
        """As `wg` reads it, with its line end. Call `public` first."""
        path = self._path(slot, generation)
        try:
            sealed = base64.b64decode(json.loads(path.read_bytes())["sealed"])
            return await self._sealer.open(sealed, context=_context(slot, generation))
        except (OSError, ValueError, KeyError, TypeError, SealBroken) as error:
            raise AgentError("tunnel.key_broken", f"{path}: {error}", retryable=False) from error

    def keep(self, wanted: frozenset[tuple[str, int]]) -> None:
        """Forget every other key."""
        names = {self._path(slot, generation).name for slot, generation in wanted}
        for path in self._directory.glob("*.json") if self._directory.is_dir() else ():
            if path.name not in names:
                files.remove(path)

    async def _make(self, path: Path, slot: str, generation: int) -> str:
        private = (await run(WG, "genkey")).stdout
        public = (await run(WG, "pubkey", stdin=private)).stdout.decode().strip()
        sealed = await self._sealer.seal(private, context=_context(slot, generation))
        content = {"public": public, "sealed": base64.b64encode(sealed).decode()}
        files.write_atomically(path, json.dumps(content).encode(), mode=0o600)
        return public

    def _path(self, slot: str, generation: int) -> Path:
        return self._directory / f"{slot}-{generation}.json"


def _context(slot: str, generation: int) -> str:
    return f"tunnel.{slot}:{generation}"
