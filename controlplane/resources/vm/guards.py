"""What a host must have been told before a machine starts there: the host's policy and the machine's firewalls.

The one rule: the plan is made here and now, so that what is looked for is what holds for this machine's interfaces.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.documents import service as documents
from controlplane.models.nic import Nic
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.firewall.reconcile import KIND, plan
from controlplane.resources.host.reconcile import POLICY, plan_policy
from controlplane.settings import NetworkSettings


async def missing(session: AsyncSession, settings: NetworkSettings, vm_id: str, host_id: str) -> Sequence[tuple[str, str]]:
    """The (kind, id) of documents that the host has not carried out yet; they are on their way afterwards."""
    network_ids = list(await session.scalars(select(Nic.network_id).where(Nic.owner_id == vm_id)))
    mine = await firewalls.firewalls_of(session, network_ids, vm_id)
    for firewall_id in mine:
        await plan(session, firewall_id)
    await plan_policy(session, settings, only=host_id)
    return await documents.missing_on(session, host_id, [(POLICY, POLICY), *((KIND, firewall_id) for firewall_id in mine)])
