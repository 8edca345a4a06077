"""How a host is reached: address, pinned key, our private key. The one rule: the private key is plain in memory only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import asyncpg

from controlplane.core.sealing import SealBroken, Sealer
from controlplane.remote.link import HostUnreachable

AGENT_USER = "bedplate"
_QUERY = "SELECT address, port, host_key_fingerprint, ssh_key_sealed FROM host WHERE id = $1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """`fingerprint`: `SHA256:…` of the only host key accepted. `private_key`: OpenSSH's or PEM format."""

    address: str
    port: int
    fingerprint: str
    private_key: bytes = field(repr=False)
    user: str = AGENT_USER


class Directory(Protocol):
    async def access(self, host_id: str) -> Access:
        """Raises HostUnreachable for a host that is unknown or has no key yet."""
        ...


class RowDirectory:
    """From the host's row, opened with the deployment's sealer."""

    def __init__(self, pool: asyncpg.Pool, sealer: Sealer) -> None:
        self._pool = pool
        self._sealer = sealer

    async def access(self, host_id: str) -> Access:
        row = await self._pool.fetchrow(_QUERY, host_id)
        if row is None or row["ssh_key_sealed"] is None:
            raise HostUnreachable(host_id, "no such host, or no key of it")
        try:
            private_key = self._sealer.open(row["ssh_key_sealed"], context=key_context(host_id))
        except SealBroken as error:
            raise HostUnreachable(host_id, f"its key cannot be opened: {error}") from error
        return Access(
            address=row["address"], port=row["port"], fingerprint=row["host_key_fingerprint"], private_key=private_key
        )


def key_context(host_id: str) -> str:
    """What the agent's key of a host is sealed for."""
    return f"host.ssh_key:{host_id}"
