"""Reading firewalls with all that the API shows of them: one query a kind, never one a firewall."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents.queries import Behind, Said, applied, behind_on
from controlplane.models.firewall import Firewall, FirewallAttachment, FirewallRule
from controlplane.models.host_document import HostDocument
from controlplane.models.network import Network
from controlplane.models.vm import Vm


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRule:
    row: FirewallRule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def port_first(self) -> int | None:
        return self.row.port_first or None

    @property
    def port_last(self) -> int | None:
        return self.row.port_last or None

    @property
    def firewall_id(self) -> str | None:
        return self.row.peer_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    kind: str
    id: str
    name: str


@dataclass(slots=True, kw_only=True)
class ShownFirewall:
    """A firewall; other attributes are the row's, read when the answer is written."""

    row: Firewall
    rules: list[ShownRule] = field(default_factory=list)
    attached_to: list[Attached] = field(default_factory=list)
    hosts: int = 0
    behind: Sequence[Behind] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.row, name)

    @property
    def conditions(self) -> list[Said]:
        return [applied(self.row.observed_generation >= self.row.generation, self.behind)]


async def shown(session: AsyncSession, firewalls: Iterable[Firewall]) -> list[ShownFirewall]:
    found = {row.id: ShownFirewall(row=row) for row in firewalls}
    ids = list(found)
    for rule in await session.scalars(
        select(FirewallRule).where(FirewallRule.firewall_id.in_(ids)).order_by(FirewallRule.position, FirewallRule.id)
    ):
        found[rule.firewall_id].rules.append(ShownRule(row=rule))
    query = (
        select(FirewallAttachment.firewall_id, Network.id, Network.name, Vm.id, Vm.name)
        .outerjoin(Network, Network.id == FirewallAttachment.network_id)
        .outerjoin(Vm, Vm.id == FirewallAttachment.vm_id)
        .where(FirewallAttachment.firewall_id.in_(ids))
        .order_by(FirewallAttachment.id)
    )
    for firewall_id, network_id, network, vm_id, vm in await session.execute(query):
        item = Attached(kind="network", id=network_id, name=network) if network_id else Attached(kind="vm", id=vm_id, name=vm)
        found[firewall_id].attached_to.append(item)
    here = HostDocument.kind == "firewall", HostDocument.object_id.in_(ids), HostDocument.is_wanted
    counts = select(HostDocument.object_id, func.count()).where(*here).group_by(HostDocument.object_id)
    for firewall_id, count in await session.execute(counts):
        found[firewall_id].hosts = count
    for firewall_id, behind in (await behind_on(session, "firewall", ids)).items():
        found[firewall_id].behind = behind
    return list(found.values())


async def show(session: AsyncSession, firewall: Firewall) -> ShownFirewall:
    (one,) = await shown(session, [firewall])
    return one
