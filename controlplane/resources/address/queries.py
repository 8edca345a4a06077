"""Reading addresses with all that the API shows of them: one query a kind, never one an address."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents.queries import Behind, Said, applied, behind_on, holders_of
from controlplane.models.address import Address
from controlplane.models.loadbalancer import Loadbalancer
from controlplane.models.vm import Vm


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAddress:
    """An address; other attributes are the row's, read when the answer is written."""

    row: Address
    target: str | None
    held_by: Sequence[str]
    standby: Sequence[str]
    behind: Sequence[Behind]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def conditions(self) -> list[Said]:
        row = self.row
        said = [applied(row.observed_generation >= row.generation, self.behind)]
        if (row.vm_id or row.loadbalancer_id) and not self.held_by and not self.behind:
            words = "No host can hold it: the VM has none, or no edge host is up."
            said.append(Said(type="Held", status="false", reason="address.no_holder", message=words))
        return said


async def shown(session: AsyncSession, addresses: Iterable[Address]) -> list[ShownAddress]:
    rows = list(addresses)
    names: dict[str, str] = {}
    for model, ids in ((Vm, {row.vm_id for row in rows}), (Loadbalancer, {row.loadbalancer_id for row in rows})):
        found = await session.execute(select(model.id, model.name).where(model.id.in_([one for one in ids if one])))
        names |= {row[0]: row[1] for row in found}
    ids = [row.id for row in rows]
    behind, held = await behind_on(session, "address", ids), await holders_of(session, "address", ids)
    standby = await holders_of(session, "address", ids, is_standby=True)
    return [
        ShownAddress(
            row=row,
            target=names.get(row.vm_id or row.loadbalancer_id or ""),
            held_by=held.get(row.id, ()),
            standby=standby.get(row.id, ()),
            behind=behind.get(row.id, ()),
        )
        for row in rows
    ]


async def target_name(session: AsyncSession, address: Address) -> str:
    """What it is attached to, as a person knows it."""
    model, target_id = (Vm, address.vm_id) if address.vm_id is not None else (Loadbalancer, address.loadbalancer_id)
    name = await session.scalar(select(model.name).where(model.id == target_id))
    return f"{'VM' if address.vm_id is not None else 'load balancer'} {name}"


async def show(session: AsyncSession, address: Address) -> ShownAddress:
    (one,) = await shown(session, [address])
    return one
