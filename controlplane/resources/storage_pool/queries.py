"""Reads of storage pools, with what the API says of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.storage_pool import StoragePool


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One condition."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    since: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPool:
    row: StoragePool
    host: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def allocatable_bytes(self) -> int:
        row = self.row
        return max(min(row.total_bytes - row.reserved_bytes, row.free_bytes) - row.kept_free_bytes, 0)

    @property
    def conditions(self) -> list[Said]:
        row = self.row
        if not row.is_available:
            words = f"Host {self.host} does not see pool {row.name}: its disk is missing or not mounted."
            return [Said(type="Available", status="false", reason="storage_pool.missing", message=words, since=row.seen_at)]
        found = [Said(type="Available", status="true")]
        if row.is_low:
            found.append(Said(type="Low", status="true", reason="storage_pool.low", message=low_words(row, self.host)))
        return found


def low_words(row: StoragePool, host: str) -> str:
    percent = row.free_bytes * 100 // max(row.total_bytes, 1)
    return (
        f"Pool {row.name} of host {host} has {row.free_bytes} of {row.total_bytes} bytes left ({percent} %): "
        "nothing new is placed there. Delete volumes or snapshots, or add a disk."
    )


async def shown(session: AsyncSession, pools: Iterable[StoragePool]) -> Sequence[ShownPool]:
    rows = list(pools)
    names = select(Host.id, Host.name).where(Host.id.in_({row.host_id for row in rows}))
    hosts = {row[0]: row[1] for row in await session.execute(names)}
    return [ShownPool(row=row, host=hosts.get(row.host_id, "")) for row in rows]
