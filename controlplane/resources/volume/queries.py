"""Reading volumes with all that the API shows of them: one query a kind, never one a volume."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import LIMITS, Volume
from controlplane.resources.snapshot.queries import Said, ShownProgress, progress_of, runs_of
from controlplane.resources.volume.conditions import conditions_of, status_of

IN_ORDER: tuple[ColumnElement[Any], ...] = (Volume.is_boot.desc(), Volume.attached_at.asc(), Volume.id.asc())
"""How the disks of a machine follow each other: the root one first, then as they came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVolume:
    """A volume with what belongs to it; other attributes are the row's, read when the answer is written."""

    row: Volume
    machine: Vm | None
    host: Host | None
    run: Run | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def status(self) -> str:
        return status_of(self.row, self.host, self.run)

    @property
    def is_root(self) -> bool:
        return self.row.is_boot

    @property
    def vm(self) -> str | None:
        return self.machine.name if self.machine is not None else None

    @property
    def wanted(self) -> dict[str, Any]:
        row = self.row
        limits = {name: getattr(row, name) for name in (*LIMITS, "burst_seconds")}
        return {"size_bytes": row.size_bytes, "limits": limits, "num_queues": row.num_queues, "queue_size": row.queue_size}

    @property
    def observed(self) -> dict[str, Any]:
        row = self.row
        return {
            "state": row.observed_state,
            "host": self.host.name if self.host is not None else None,
            "size_bytes": row.observed_size_bytes,
            "takes_effect": row.takes_effect,
            "is_encrypted": row.is_encrypted,
            "generation": row.observed_generation,
            "at": row.observed_at,
            "detail": row.observed_detail,
        }

    @property
    def conditions(self) -> list[Said]:
        return conditions_of(self.row, self.machine, self.host, self.run)

    @property
    def progress(self) -> ShownProgress | None:
        return progress_of(self.run)


async def shown(session: AsyncSession, volumes: Iterable[Volume]) -> list[ShownVolume]:
    rows = list(volumes)
    hosts_query = select(Host).where(Host.id.in_({row.host_id for row in rows if row.host_id}))
    hosts = {host.id: host for host in await session.scalars(hosts_query)}
    machines_query = select(Vm).where(Vm.id.in_({row.vm_id for row in rows if row.vm_id}))
    machines = {vm.id: vm for vm in await session.scalars(machines_query)}
    runs = await runs_of(session, "volume", [row.id for row in rows])
    return [
        ShownVolume(row=row, machine=machines.get(row.vm_id or ""), host=hosts.get(row.host_id or ""), run=runs.get(row.id))
        for row in rows
    ]


async def show(session: AsyncSession, volume: Volume) -> ShownVolume:
    (one,) = await shown(session, [volume])
    return one
