"""What a host must have been told before a machine starts there: the host's policy and the machine's firewalls.

The one rule: the plan is made here and now, so that what is looked for is what holds for this machine's interfaces.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.models.host_document import HostDocument
from controlplane.models.nic import Nic
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.firewall.reconcile import KIND, plan
from controlplane.resources.host.reconcile import POLICY, plan_policy
from controlplane.settings import NetworkSettings
from hostagent.protocol.errors import AgentError


async def missing(session: AsyncSession, settings: NetworkSettings, vm_id: str, host_id: str) -> Sequence[tuple[str, str]]:
    """The (kind, id) of documents that the host has not carried out yet; they are on their way afterwards."""
    network_ids = list(await session.scalars(select(Nic.network_id).where(Nic.owner_id == vm_id)))
    mine = await firewalls.firewalls_of(session, network_ids, vm_id)
    for firewall_id in mine:
        await plan(session, firewall_id)
    await plan_policy(session, settings, only=host_id)
    return await documents.missing_on(session, host_id, [(POLICY, POLICY), *((KIND, firewall_id) for firewall_id in mine)])


async def refusal(session: AsyncSession, host_id: str, objects: Collection[tuple[str, str]]) -> AgentError | None:
    """What the host said against one of these documents, for the machine's own conditions; None: it is at them."""
    query = select(HostDocument).where(HostDocument.host_id == host_id, HostDocument.failure != "")
    for row in await session.scalars(query.order_by(HostDocument.kind, HostDocument.object_id)):
        if (row.kind, row.object_id) in objects:
            return AgentError(row.failure, f"{row.kind} {row.object_id}: {row.detail}")
    return None
