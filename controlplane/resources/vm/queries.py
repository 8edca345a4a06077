"""Reading VMs with all that the API shows of them: one query a kind, never one a VM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.image import Image
from controlplane.models.nic import Nic
from controlplane.models.run import Run
from controlplane.models.vm import Vm
from controlplane.models.volume import Volume
from controlplane.resources.nic.queries import nics_of
from controlplane.resources.vm.conditions import Said, conditions_of, status_of
from controlplane.resources.volume.queries import IN_ORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownProgress:
    step: str
    attempt: int
    deadline_at: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownWanted:
    row: Vm
    disk_bytes: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownObserved:
    row: Vm
    host: str | None

    @property
    def power(self) -> str:
        return self.row.observed_power

    @property
    def vcpus(self) -> int:
        return self.row.applied_vcpus

    @property
    def memory_bytes(self) -> int:
        return self.row.applied_memory_bytes

    @property
    def driver(self) -> str | None:
        return self.row.driver

    @property
    def generation(self) -> int:
        return self.row.observed_generation

    @property
    def at(self) -> Any:
        return self.row.observed_at

    @property
    def started_at(self) -> Any:
        return self.row.started_at

    @property
    def detail(self) -> Any:
        return self.row.observed_detail


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVm:
    """A VM with what belongs to it; other attributes are the row's, read when the answer is written."""

    row: Vm
    image: str
    nics: Sequence[Nic]
    volumes: Sequence[Volume]
    host: Host | None
    run: Run | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def status(self) -> str:
        return status_of(self.row, self.host, self.run)

    @property
    def conditions(self) -> list[Said]:
        return conditions_of(self.row, self.host, self.run, self.volumes)

    @property
    def ipv4(self) -> IPv4Address | None:
        return self.nics[0].ipv4 if self.nics else None

    @property
    def ipv6(self) -> IPv6Address | None:
        return self.nics[0].ipv6 if self.nics else None

    @property
    def root(self) -> Volume | None:
        return next((volume for volume in self.volumes if volume.is_boot), None)

    @property
    def volume_ids(self) -> list[str]:
        return [volume.id for volume in self.volumes]

    @property
    def root_volume_id(self) -> str | None:
        return self.root.id if self.root else None

    @property
    def wanted(self) -> ShownWanted:
        return ShownWanted(row=self.row, disk_bytes=self.root.size_bytes if self.root else 0)

    @property
    def observed(self) -> ShownObserved:
        return ShownObserved(row=self.row, host=self.host.name if self.host else None)

    @property
    def progress(self) -> ShownProgress | None:
        run = self.run
        if run is None or run.parked_at is not None or run.deadline_at is None:
            return None
        return ShownProgress(step=run.step, attempt=run.attempt, deadline_at=run.deadline_at)


async def shown(session: AsyncSession, vms: Iterable[Vm]) -> list[ShownVm]:
    rows = list(vms)
    ids = [row.id for row in rows]
    image_names = select(Image.id, Image.name).where(Image.id.in_({row.image_id for row in rows}))
    images = {row[0]: row[1] for row in await session.execute(image_names)}
    hosts_query = select(Host).where(Host.id.in_({row.host_id for row in rows if row.host_id}))
    hosts = {host.id: host for host in await session.scalars(hosts_query)}
    volumes: dict[str, list[Volume]] = {}
    for volume in await session.scalars(select(Volume).where(Volume.vm_id.in_(ids)).order_by(*IN_ORDER)):
        volumes.setdefault(volume.vm_id or "", []).append(volume)
    runs_query = select(Run).where(Run.program == "vm", Run.subject.in_(ids), Run.finished_at.is_(None))
    runs = {run.subject: run for run in await session.scalars(runs_query.execution_options(populate_existing=True))}
    nics = await nics_of(session, ids)
    return [
        ShownVm(
            row=row,
            image=images.get(row.image_id, ""),
            nics=nics.get(row.id, ()),
            volumes=volumes.get(row.id, ()),
            host=hosts.get(row.host_id or ""),
            run=runs.get(row.id),
        )
        for row in rows
    ]


async def show(session: AsyncSession, vm: Vm) -> ShownVm:
    (one,) = await shown(session, [vm])
    return one
