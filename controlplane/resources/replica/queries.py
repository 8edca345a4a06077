"""Reads of replicas, with their machines and hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.replica import Replica
from controlplane.models.run import Run
from controlplane.models.vm import Vm


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownReplica:
    """A replica; other attributes are the row's."""

    row: Replica
    vm: Vm | None
    host: str | None
    run: Run | None
    machine_run: Run | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def short_id(self) -> str:
        return self.row.id[-8:]

    @property
    def isolation(self) -> str | None:
        return None if self.vm is None else self.vm.isolation

    @property
    def driver(self) -> str | None:
        return None if self.vm is None else self.vm.driver

    @property
    def accelerator(self) -> str | None:
        """`kvm` or `tcg` as the host saw it at the machine's start; None for what has no virtual processor."""
        found = None if self.vm is None else self.vm.observed_detail.get("accelerator")
        return str(found) if found else None

    @property
    def step(self) -> str:
        """What is being done; while the machine is made, the machine's own step."""
        if self.run is None:
            return ""
        if self.run.step in ("start", "boot") and self.machine_run is not None:
            return f"machine: {self.machine_run.step}"
        return self.run.step

    @property
    def reason(self) -> str:
        """Why it is not ready, in words."""
        for run in (self.run, self.machine_run):
            if run is not None and run.parked_at is not None:
                return f"{run.parked_code}: {run.parked_detail}"
        if self.row.failure:
            return self.row.failure
        last = [run.last_error for run in (self.run, self.machine_run) if run is not None and run.last_error]
        return last[0] if last and self.row.state != "ready" else ""


async def of_endpoints(session: AsyncSession, endpoint_ids: Sequence[str]) -> dict[str, list[ShownReplica]]:
    """Replicas by endpoint, oldest first."""
    query = (
        select(Replica, Vm, Host.name)
        .outerjoin(Vm, Vm.id == Replica.vm_id)
        .outerjoin(Host, Host.id == Vm.host_id)
        .where(Replica.endpoint_id.in_(endpoint_ids))
        .order_by(Replica.id)
        .execution_options(populate_existing=True)
    )
    rows = (await session.execute(query)).all()
    subjects = [row[0].id for row in rows] + [row[1].id for row in rows if row[1] is not None]
    runs_query = select(Run).where(Run.program.in_(("replica", "vm")), Run.subject.in_(subjects), Run.finished_at.is_(None))
    runs = {run.subject: run for run in await session.scalars(runs_query.execution_options(populate_existing=True))}
    found: dict[str, list[ShownReplica]] = {endpoint_id: [] for endpoint_id in endpoint_ids}
    for replica, vm, host in rows:
        shown = ShownReplica(
            row=replica, vm=vm, host=host, run=runs.get(replica.id), machine_run=runs.get(vm.id) if vm is not None else None
        )
        found[replica.endpoint_id].append(shown)
    return found
