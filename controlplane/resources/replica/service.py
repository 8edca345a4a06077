"""Changes of replicas. The one rule: a replica takes its share of a host and its address in the transaction that makes it."""

from __future__ import annotations

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.models.endpoint import Endpoint
from controlplane.models.image import Image
from controlplane.models.replica import Replica
from controlplane.models.vm import Vm
from controlplane.resources.key.publish import publish
from controlplane.resources.model.plan import plan_of, workload
from controlplane.resources.nic.service import allocate_nic
from controlplane.resources.vm.service import place

PROGRAM = "replica"


async def create(session: AsyncSession, endpoint: Endpoint) -> tuple[Replica, Vm]:
    """A replica with its machine, placed or waiting (`vm.host_id` None, `vm.shortage` says why)."""
    spec = endpoint.spec
    plan = plan_of(spec)
    image = await session.get_one(Image, str(spec["engine_image_id"]))
    replica_id = new_id(Kind.REPLICA)
    vm = Vm(
        id=new_id(Kind.VM),
        project_id=endpoint.project_id,
        name=f"{endpoint.name[:40].rstrip('-')}-{replica_id[-8:]}",
        owner_id=replica_id,
        image_id=image.id,
        workload=workload(plan, vcpus=endpoint.vcpus, weights_image_id=str(spec["weights_image_id"])),
        isolation=str(spec["isolation"]),
        vcpus=endpoint.vcpus,
        memory_bytes=endpoint.memory_bytes,
        applied_vcpus=endpoint.vcpus,
        applied_memory_bytes=endpoint.memory_bytes,
        placement={},
        user=image.default_user,
        ssh_keys=[],
        on_guest_poweroff="restart",
    )
    session.add(vm)
    await session.flush()
    replica = Replica(id=replica_id, project_id=endpoint.project_id, endpoint_id=endpoint.id, vm_id=vm.id)
    session.add(replica)
    await session.flush()
    await place(session, vm, image.architecture)
    assert endpoint.network_id is not None
    await allocate_nic(session, endpoint.network_id, owner_id=vm.id, host_id=vm.host_id)
    await kernel.start(session, PROGRAM, replica.id, host_id=vm.host_id)
    return replica, vm


async def remove(session: AsyncSession, replica: Replica) -> None:
    """Begin to take it away: gateways stop sending to it at once. Doing it twice is once."""
    if replica.state != "deleting":
        replica.state, replica.deleting_at = "deleting", func.now()
        replica.generation += 1
        await kernel.start(session, PROGRAM, replica.id)
        await kernel.destroy(session, PROGRAM, replica.id)
        await publish(session, "routes")
